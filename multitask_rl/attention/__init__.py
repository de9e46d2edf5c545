"""Attention of our own: blocks of packed rows, shared prompts, parts of sequences, float32 on CPUs."""

from multitask_rl.lazy import import_generation

import_generation()  # every process that loads a model imports this package first
