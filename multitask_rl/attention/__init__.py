"""Attention of our own: packed blocks, shared prompts, wide rows of decoding."""
