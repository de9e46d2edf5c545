"""The page of a run: one HTML file that works offline."""
