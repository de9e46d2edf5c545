"""Trackers: console, JSON lines, MLflow, alerts."""
