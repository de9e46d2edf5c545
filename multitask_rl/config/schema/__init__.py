"""From text to typed values with their places: building dataclasses, located YAML, ranges."""
