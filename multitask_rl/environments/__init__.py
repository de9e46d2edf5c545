"""Environments: worlds and tools that an actor talks to over several turns."""
