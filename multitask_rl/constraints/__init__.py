"""Constraints: judging while sampling, the Lagrange multiplier, the test whether a limit holds."""
