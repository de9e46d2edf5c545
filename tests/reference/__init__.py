"""A reference of a training step, written from the documented formulas, and its comparison with the product.

``naive/`` computes a step slowly and readably; it imports nothing of ``multitask_rl``. ``world.py`` is what
both sides are given (prompts, responses, scores), ``cases.py`` draws settings, ``product.py`` runs the real
classes and ``compare.py`` names every difference. Command: ``python -m tests.reference --n 2000 --seed 1``.
"""
