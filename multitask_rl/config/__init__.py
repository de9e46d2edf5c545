"""What a run is: dataclasses that hold every default, and the tasks file."""
