"""The parts of ``benchmarks/fuzz.py``: mutations, cases, and the processes that run them."""
