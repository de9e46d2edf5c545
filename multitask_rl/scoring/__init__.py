"""Scoring: reward and constraint plugins, pooled, isolated, with time limits."""
