"""Pages of runs as HTML files that work offline, summaries, and comparisons of runs."""
