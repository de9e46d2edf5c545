"""Learning: credit, micro-batches, losses, the optimizer."""
