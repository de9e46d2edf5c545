"""Attention of our own: blocks of packed rows, shared prompts, parts of sequences, float32 on CPUs."""
