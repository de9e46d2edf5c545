"""What a run is: its plan, its parts, its directory and checkpoints, its supervisor."""
