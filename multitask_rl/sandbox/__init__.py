"""Runs programs nobody trusts."""
