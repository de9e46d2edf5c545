"""Where the numbers go: console, JSON lines, MLflow."""
