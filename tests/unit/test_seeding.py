"""Streams by hash: separate, stable, reopenable."""

import random
import subprocess
import sys

import numpy as np
import torch

from multitask_rl.seeding import derive_seed, random_stream, seed_generators


def test_streams_of_different_names_never_share_a_seed() -> None:
    names = [
        (s, p, t, i) for s in range(5) for p in ("data", "rollout") for t in ("a", "b") for i in range(200)
    ]
    seeds = {derive_seed(s, *rest) for s, *rest in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_joined_names_and_types_are_different_streams() -> None:
    assert derive_seed(0, "a", 1) != derive_seed(0, "a1")
    assert derive_seed(0, "a", 1) != derive_seed(0, "a", "1")
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")


def test_seed_is_the_same_in_another_process() -> None:
    code = "from multitask_rl.seeding import derive_seed; print(derive_seed(7, 'data', 'math', 3))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == derive_seed(7, "data", "math", 3)


def test_seed_is_a_value_that_never_changes() -> None:
    assert derive_seed(0, "data", "math", 3) == GOLDEN


def test_stream_opened_again_gives_the_same_numbers() -> None:
    first, again = random_stream(1, "x", 2), random_stream(1, "x", 2)
    assert [first.random() for _ in range(5)] == [again.random() for _ in range(5)]


def test_global_generators_are_seeded_alike_where_they_are_loaded() -> None:
    own = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def numbers() -> list[float]:
        seed_generators(2**62 + 1)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    try:
        assert numbers() == numbers()
    finally:
        random.setstate(own[0])
        np.random.set_state(own[1])
        torch.set_rng_state(own[2])
    code = "import sys, multitask_rl.seeding as s; s.seed_generators(1); print({'torch'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


GOLDEN = 6957164344341976654
"""Checkpoints and published runs depend on it."""
