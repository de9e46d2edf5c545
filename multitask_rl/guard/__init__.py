"""Watches held-out abilities and decides on rollback."""
