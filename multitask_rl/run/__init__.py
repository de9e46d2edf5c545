"""What a run is: its plan, its parts, its directory, its supervisor."""
