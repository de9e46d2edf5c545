"""Random streams derived by hash, so that no two purposes, tasks or samples share one.

``seed + i`` makes streams collide: item 5 of task 0 is item 4 of task 1. A hash of the whole
name does not, and a stream can be opened again anywhere from its name alone.
"""

from __future__ import annotations

import hashlib
import random
import sys


def derive_seed(seed: int, *name: str | int) -> int:
    """Return a 63-bit seed for the stream ``name`` (purpose, task, index...) of the run's ``seed``.

    >>> derive_seed(0, "data", 1) == derive_seed(0, "data", "1")
    False
    """
    key = repr((seed, *name)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def random_stream(seed: int, *name: str | int) -> random.Random:
    """Return the ``random.Random`` of the stream ``name``."""
    return random.Random(derive_seed(seed, *name))


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process: Python's, and those of NumPy and torch if imported."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
