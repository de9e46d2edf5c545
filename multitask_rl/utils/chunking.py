"""Generation after long prompts."""

from multitask_rl.api.chunked_generator import ChunkedGenerator

__all__ = ["ChunkedGenerator"]
