"""Learning: packing, losses, the shared actor, checkpoints."""
