"""What a step is: the flow from prompts to credited samples, its stages, its numbers."""
