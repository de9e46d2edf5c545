"""Random streams derived by hash, so that no two purposes, tasks or samples share one.

``seed + i`` makes streams collide: item 5 of task 0 is item 4 of task 1. A hash of the whole
name does not, and a stream can be opened again anywhere from its name alone.
"""

from __future__ import annotations

import hashlib
import random


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
