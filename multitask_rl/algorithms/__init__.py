"""RL algorithms: one per file, pure functions of rewards and log-probabilities."""
