"""What a number of a task means, and how certain it is."""
