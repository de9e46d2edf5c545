"""Pure mathematics: one algorithm per file, one idea per module."""
