"""Learner ranks: processes that compute one gradient together, by samples and by parts of sequences."""
