"""Calls of plugins in a process that can be killed, and in the trainer's own."""
