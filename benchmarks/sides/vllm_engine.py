"""The ``vllm`` rollout engine, or vLLM alone on the same requests; and the engine's weight update.

Mixed prompts of four tasks, each with sampling parameters and a group size of its own. vLLM alone is used as
its documentation shows: one request per prompt with ``n``, log-probabilities of the sampled tokens, no seeds.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

from workload import EOS, KINDS, MIXED_NEW, PROMPTS, arguments, prompts, serve

GROUPS = dict(zip(KINDS, (4, 8, 8, 12), strict=True))
TEMPERATURES = dict(zip(KINDS, (1.0, 1.0, 0.8, 1.2), strict=True))


def engine() -> Any:
    """Return the engine, as a run starts it."""
    import torch

    from multitask_rl.rollout.vllm.engine import VLLMEngine

    torch.set_num_threads(args.threads)
    # float32 or bfloat16 throughout: weights and activations alike
    config = {"max_num_seqs": 256, "dtype": args.dtype}
    return VLLMEngine(args.model, config=config, seed=args.seed, eos_token_ids=[EOS])


def work() -> list[tuple[str, list[int]]]:
    """Return kind and token ids of every prompt of all steps."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    texts = prompts(PROMPTS * args.steps, args.seed, "mixed")
    return [(text[0], tokenizer(text)["input_ids"]) for text in texts]


def ours() -> None:
    """Serve generation through the engine, and updates of its weights beside a plain copy."""
    import torch
    from transformers import AutoModelForCausalLM

    from multitask_rl.records import SamplingParams
    from multitask_rl.rollout.base import GenerationRequest

    own, items = engine(), work()
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    weights = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    copied = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def renew(version: int) -> None:
        for tensor in weights.values():
            tensor.mul_(1.001)
        own.update_weights(weights, version)

    renew(1)  # watched
    renew(2)  # proven
    (plan,) = own._llm.collective_rpc(lambda worker: worker._taken_plan)

    def copy() -> None:
        for name, tensor in weights.items():
            copied[name].copy_(tensor)

    def step(number: int) -> dict[str, float]:
        mine = items[number * PROMPTS : (number + 1) * PROMPTS]
        requests = [
            GenerationRequest(
                prompt_ids=ids,
                sampling=SamplingParams(max_new_tokens=MIXED_NEW, temperature=TEMPERATURES[kind]),
                seeds=[1000 * number + 100 * i + j for j in range(GROUPS[kind])],
            )
            for i, (kind, ids) in enumerate(mine)
        ]
        measured = _timed(lambda: own.generate(requests))
        new = sum(len(g.response_ids) for group in measured.pop("result") for g in group)
        shares = own.num_cached_tokens / own.num_prompt_tokens
        for name, act in (
            ("update", lambda: renew_timed(number)),
            ("copy", copy),
            ("pack", lambda: plan.apply({})),
        ):
            took = _timed(act)
            measured |= {f"{name}_ms": 1e3 * took["step_s"], f"{name}_cpu_ms": 1e3 * took["cpu_s"]}
        measured["is_by_plan"] = float(own._loader.is_proven)
        return {**measured, "gen_s": measured["step_s"], "new_tokens": new, "cached_share": shares}

    def renew_timed(number: int) -> None:
        own.update_weights(weights, number + 3)

    serve(step)


def alone() -> None:
    """Serve generation through vLLM's own ``LLM``."""
    from multitask_rl.rollout.vllm.engine import on_engine_device

    llm, items = engine()._llm, work()
    from vllm import SamplingParams

    def step(number: int) -> dict[str, float]:
        llm.reset_prefix_cache()
        mine = items[number * PROMPTS : (number + 1) * PROMPTS]
        given = [{"prompt_token_ids": ids} for _, ids in mine]
        sampling = [
            SamplingParams(
                n=GROUPS[kind],
                max_tokens=MIXED_NEW,
                temperature=TEMPERATURES[kind],
                logprobs=0,
                detokenize=False,
            )
            for kind, _ in mine
        ]

        def call() -> Any:
            with on_engine_device():
                return llm.generate(given, sampling, use_tqdm=False)

        measured = _timed(call)
        new = sum(len(c.token_ids) for output in measured.pop("result") for c in output.outputs)
        return {**measured, "gen_s": measured["step_s"], "new_tokens": new}

    serve(step)


def _timed(call: Any) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    result = call()
    return {
        "step_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "result": result,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    args = arguments(__doc__)
    (alone if os.environ.get("SIDE") == "alone" else ours)()
