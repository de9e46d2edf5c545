"""Trackers (console, JSON lines, MLflow, TensorBoard, W&B, trackio, alerts), and readers of their records."""
