"""The claims of ``benchmarks/multitask.py``: one module each, on one harness."""
