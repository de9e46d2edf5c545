"""Samples of a call, one vLLM step at a time: each is handed on when it ends, and may be ended before.

``LLM.generate`` returns when the last sample has ended. Here the first rewards are computed while the rest is
decoded (continuous batching as ever), monitors see responses that are not finished, and what is to be sampled
again joins the batch that is running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from multitask_rl.records import FLAGGED, SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, Watch, look

__all__ = ["Decoding", "eager_on_cpu"]


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample under way."""

    request: int
    sample: int
    seed: int
    watch: Watch | None
    inner: str
    """Its name inside vLLM."""


class Decoding:
    """The samples of a call under way; more may be added while it runs.

    Args:
        llm: the ``LLM``.
        sampling: vLLM's parameters of ours and a seed.
    """

    def __init__(self, llm: Any, sampling: Callable[[SamplingParams, int], Any]) -> None:
        self._llm = llm
        self._sampling = sampling
        self._rows: dict[str, _Row] = {}

    def add(self, index: int, request: GenerationRequest) -> None:
        """Hand vLLM the samples of request ``index``; it admits them to its batch at the next step."""
        from vllm.sampling_params import RequestOutputKind

        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        kind = RequestOutputKind.CUMULATIVE if request.watch else RequestOutputKind.FINAL_ONLY
        for sample, seed in enumerate(request.seeds):
            params = self._sampling(request.sampling, seed)
            params.output_kind = kind
            name = str(next(self._llm.request_counter))
            inner = self._llm.llm_engine.add_request(name, prompt, params)
            # by the name that its outputs carry
            self._rows[name] = _Row(index, sample, seed, request.watch, inner)

    def run(self) -> Iterator[tuple[list[Ended], list[Any]]]:
        """Yield the samples that ended in a step, with vLLM's outputs, until none is left."""
        engine, rows = self._llm.llm_engine, self._rows
        while engine.has_unfinished_requests():
            with eager_on_cpu():
                outputs = engine.step()
            ended = [output for output in outputs if output.finished]
            generated = [_generation(output) for output in ended]
            due = [o for o in outputs if not o.finished and _is_due(rows[o.request_id].watch, o)]
            flagged = _flagged(due, rows) if due else []
            if flagged:
                engine.abort_request([rows[output.request_id].inner for output in flagged], internal=True)
                ended += flagged
                generated += [replace(_generation(output), finish_reason=FLAGGED) for output in flagged]
            if ended:
                places = [rows.pop(output.request_id) for output in ended]
                yield [(r.request, r.sample, g) for r, g in zip(places, generated, strict=True)], ended


def _is_due(watch: Watch | None, output: Any) -> bool:
    """Whether the response's monitor wants to see it at this length."""
    length = len(output.outputs[0].token_ids)
    return watch is not None and length > 0 and length % watch.every == 0


def _flagged(due: Sequence[Any], rows: dict[str, _Row]) -> list[Any]:
    """Return the outputs, of those ``due``, that their monitors end."""
    shown = []
    for output in due:
        row = rows[output.request_id]
        assert row.watch is not None
        shown.append((row.watch.monitor, row.seed, list(output.outputs[0].token_ids)))
    return [due[position] for position in look(shown)]


def _generation(output: Any) -> Generation:
    completion = output.outputs[0]
    ids = [int(token) for token in completion.token_ids]
    logprobs = [
        float(position[token].logprob) for token, position in zip(ids, completion.logprobs, strict=True)
    ]
    reason = "length" if completion.finish_reason == "length" else "stop"
    return Generation(response_ids=ids, rollout_logprobs=logprobs, finish_reason=reason)


@contextlib.contextmanager
def eager_on_cpu() -> Iterator[None]:
    """Keep ``torch.compile`` out on a CPU: one kernel would cost up to 14 s at the first request."""
    if torch.cuda.is_available():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
