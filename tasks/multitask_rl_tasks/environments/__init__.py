"""Bundled environments, one a file, found through the entry points ``multitask_rl.environments``."""
