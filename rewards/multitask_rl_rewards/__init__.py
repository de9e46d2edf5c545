"""Bundled plugins; each module is reached through an entry point."""
