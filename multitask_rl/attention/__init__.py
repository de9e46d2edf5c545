"""Attention of our own: blocks of packed rows, shared prompts, parts of sequences, float32 on CPUs."""

from multitask_rl.lazy import import_generation

import_generation()  # whoever computes with a model imports this package before it loads one
