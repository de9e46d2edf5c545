"""The vLLM engine: its start, its worker, its weights."""
