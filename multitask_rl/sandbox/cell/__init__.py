"""The part of the sandbox that runs in clean interpreters, outside and inside the cell.

Standard library only and relative imports only: it is imported as ``multitask_rl.sandbox.cell`` by the
trainer and as top-level ``cell`` by the keeper, and its files are copied into the cell's root.
"""
