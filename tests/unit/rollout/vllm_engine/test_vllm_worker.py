"""Weights on their way to workers in other processes; no vLLM needed."""

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_builders import build_actor
from multitask_rl.config.run import RolloutConfig
from multitask_rl.errors import EngineError
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.rollout.vllm.weights import WeightLoader
from multitask_rl.rollout.vllm.worker import SharedWeights, WeightReceiver


def _weights(scale: int) -> dict[str, torch.Tensor]:
    return {
        "odd": torch.arange(7).float().mul(scale),
        "half": torch.arange(6).reshape(2, 3).bfloat16() * scale,
        "scalar": torch.tensor(3 * scale),
        "none": torch.empty(0, 4),
        "view": torch.arange(12.0).reshape(3, 4).t()[1:] * scale,
    }


def _read(parcels, answers) -> None:
    receiver = WeightReceiver()
    while (parcel := parcels.recv()) is not None:
        found = receiver._open_parcel(parcel)
        answers.send({name: (str(t.dtype), t.tolist()) for name, t in found.items()})


def test_another_process_reads_what_is_shared_and_its_renewal() -> None:
    context = multiprocessing.get_context("spawn")
    (parcels, ours), (theirs, answers) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    child = context.Process(target=_read, args=(parcels, answers))
    child.start()
    shared = SharedWeights(1)
    try:
        more = {**_weights(3), "added": torch.ones(10_000)}
        for weights in (_weights(1), _weights(2), more, _weights(4)):
            parcel = shared.parcel(weights)
            ours.send(json.loads(json.dumps(parcel)))  # plain values, for any serialisation
            expected = {name: (str(t.dtype), t.tolist()) for name, t in weights.items()}
            assert theirs.recv() == expected
    finally:
        ours.send(None)
        child.join()
        shared.close()
        shared.close()


def test_keys_and_values_of_old_weights_are_not_kept_in_silence() -> None:
    llm = SimpleNamespace(collective_rpc=lambda method, args: [""], reset_prefix_cache=lambda: False)
    with pytest.raises(EngineError, match="prefixes of the old weights"):
        WeightLoader(llm, lambda: [0.0], num_elsewhere=0).load({"weight": torch.ones(1)})


def test_copies_that_lose_a_small_update_do_not_take_the_place_of_reloads() -> None:
    held = torch.zeros(1)

    def take(method: str, args: tuple[str, dict[str, torch.Tensor]]) -> list[str]:
        if args[0] != "copy":  # copies lose every update
            held.copy_(args[1]["weight"])
        return [""]

    llm = SimpleNamespace(collective_rpc=take, reset_prefix_cache=lambda: True)
    loader = WeightLoader(llm, held.tolist, num_elsewhere=0)
    for number in range(6):  # as small as the updates of a warm-up
        loader.load({"weight": torch.tensor([1e-4 * number])})
        assert held.item() == pytest.approx(1e-4 * number)
    assert not loader.is_proven


class _Refuses(VLLMEngine):
    """Started, with a model of which vLLM does not know the names of weights."""

    last: Any = None

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._loader: Any = SimpleNamespace(probe=lambda: [0.0], forget=lambda: None)
        _Refuses.last, self.is_closed = self, False

    def update_weights(self, weights: Any, policy_version: int) -> None:
        raise EngineError("vLLM cannot take the weights: ValueError: no module named 'layers.0.mlp'")

    def close(self) -> None:
        self.is_closed = True


def test_a_model_whose_weights_vllm_does_not_take_ends_the_start_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"layers\.0\.mlp'\. Set rollout\.engine=hf$"):
        _Refuses.build(build_actor(), RolloutConfig(), seed=0, output_dir=tmp_path)
    assert _Refuses.last.is_closed
