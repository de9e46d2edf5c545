"""multitask_rl: one shared actor, many tasks."""

__version__ = "0.1.0"
