"""The tool of the notebook 4_a_tool_task."""


class Box:
    """A closed box. A look into it before the answer earns the reward."""

    def reset(self, **row):
        """Begin an episode on a row of the data; the text is appended to the prompt."""
        self.looks = 0
        return " What is in it? You may look."

    def look(self) -> str:
        """Look into the box."""
        self.looks += 1
        return "key"

    def get_reward(self):
        """Return 1 if the box was opened once, less for every further look."""
        return 0.0 if self.looks == 0 else 1.0 / self.looks
