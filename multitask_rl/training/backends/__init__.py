"""Where learning runs: ranks that compute one gradient together, by samples and by parts of sequences."""
