"""Sampling answers to chat prompts with a pretrained model, by one engine; driven by ``chat_speed.py``."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_prompts import MICROBATCH_TOKENS, TEMPERATURE, arguments, questions

args = arguments(__doc__)
name, _, dtype = args.engine.rpartition("-")
# vLLM starts threads of its own when it is imported
os.environ |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from workload import serve  # noqa: E402

torch.set_num_threads(args.threads)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")


def prompt_ids(step: int) -> list[list[int]]:
    """Return the prompts of a step as token ids."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in questions(step, args.prompts, args.rows)
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def ours() -> Callable[[list[list[int]], int], int]:
    """Return our engine ``hf``: the actor's own weights, or a copy in bfloat16."""
    from multitask_rl.config.run import ModelConfig, RolloutConfig
    from multitask_rl.models.actor import load_actor
    from multitask_rl.records import SamplingParams
    from multitask_rl.rollout.base import GenerationRequest
    from multitask_rl.rollout.hf import HFEngine
    from multitask_rl.rollout.snapshot import build_engine

    actor = load_actor(ModelConfig(name_or_path=args.model, dtype="float32"), "cpu")
    weights = "actor" if dtype == "float32" else dtype
    folder = Path(tempfile.mkdtemp())
    config = RolloutConfig(engine_config={"weights": weights})
    engine = build_engine(HFEngine, actor, config, seed=0, output_dir=folder)
    sampling = SamplingParams(max_new_tokens=args.new_tokens, temperature=TEMPERATURE)

    def sample(prompts: list[list[int]], step: int) -> int:
        requests = [
            GenerationRequest(
                prompt_ids=ids,
                sampling=sampling,
                seeds=[(step * args.prompts + i) * args.group + j for j in range(args.group)],
            )
            for i, ids in enumerate(prompts)
        ]
        return sum(len(g.response_ids) for group in engine.generate(requests) for g in group)

    return sample


def generate() -> Callable[[list[list[int]], int], int]:
    """Return ``model.generate`` on one padded batch."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
    ends = model.generation_config.eos_token_id

    def sample(prompts: list[list[int]], step: int) -> int:
        torch.manual_seed(step)
        rows = [ids for ids in prompts for _ in range(args.group)]
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        keys = {"max_new_tokens": args.new_tokens, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = model.generate(**batch, do_sample=True, pad_token_id=tokenizer.pad_token_id, **keys)
        answers = out[:, batch["input_ids"].shape[1] :]
        ended = torch.isin(answers, torch.as_tensor(ends)).cumsum(-1).cumsum(-1)
        return int((ended <= 1).sum())

    return sample


def vllm() -> Callable[[list[list[int]], int], int]:
    """Return vLLM alone, offline."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    keys: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 256, "enforce_eager": True}
    # a chunk of a prompt draws a token and takes the draw back: not possible with a seed on a CPU
    keys["enable_chunked_prefill"] = False
    engine = LLM(model=args.model, dtype=dtype, seed=0, disable_log_stats=True, **keys)

    def sample(prompts: list[list[int]], step: int) -> int:
        keys = {"temperature": TEMPERATURE, "max_tokens": args.new_tokens, "n": args.group}
        sampling = SamplingParams(**keys, seed=step, logprobs=0, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(one.token_ids) for answer in answers for one in answer.outputs)

    return sample


def products() -> Callable[[list[list[int]], int], int]:
    """Return a function that computes the products of decoding alone and returns the number of answer tokens.

    No engine can leave these products out. All rows have all tokens. Prompts, attention, norms, activations
    and the drawing of tokens are left out.
    """
    from multitask_rl.rollout.snapshot import PackedLinear, can_pack

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
    layers: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    rows = args.prompts * args.group
    inputs = {m.in_features: torch.randn(rows, m.in_features, dtype=m.weight.dtype) for m in layers}
    if dtype == "bfloat16" and can_pack(torch.device("cpu")):
        layers = [PackedLinear(layer) for layer in layers]

    def sample(prompts: list[list[int]], step: int) -> int:
        with torch.inference_mode():
            for _ in range(args.new_tokens):
                for layer in layers:
                    layer(inputs[layer.in_features])
        return rows * args.new_tokens

    return sample


def products_of_a_step() -> Callable[[list[list[int]], int], int]:
    """Return a function that computes a step's float32 products alone and returns the answer tokens.

    No trainer can leave these products out. Sampling: each prompt once, and each answer token, through the
    body; answer tokens through the head. Learning: the same tokens, at most ``MICROBATCH_TOKENS`` rows at a
    time, with two products of the same size backward. Each answer has all its tokens. Attention, norms,
    activations, the drawing of tokens, the loss and the optimizer are left out.
    """
    from multitask_rl.attention.products import multiply_with_onednn

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    multiply_with_onednn(model.config.hidden_size)
    head = model.get_output_embeddings()
    body = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    weights = [m.weight.detach() for m in body]
    gradients = {id(weight): torch.zeros_like(weight) for weight in [*weights, head.weight]}

    def forward(weights: list[Any], rows: int) -> None:
        inputs = {size: torch.randn(rows, size) for size in {weight.shape[1] for weight in weights}}
        for weight in weights:
            inputs[weight.shape[1]] @ weight.T

    def learn(weights: list[Any], rows: int) -> None:
        forward(weights, rows)
        sides = {size: torch.randn(rows, size) for weight in weights for size in weight.shape}
        for weight in weights:
            x, dy = sides[weight.shape[1]], sides[weight.shape[0]]
            dy @ weight
            gradients[id(weight)].addmm_(dy.T, x)

    def step(prompts: list[list[int]], step: int) -> int:
        rows = args.prompts * args.group
        answered, asked = rows * args.new_tokens, sum(map(len, prompts))
        with torch.inference_mode():
            forward(weights, asked)
            for _ in range(args.new_tokens):
                forward([*weights, head.weight], rows)
            for part, total in ((weights, asked + answered), ([head.weight], answered)):
                for done in range(0, total, MICROBATCH_TOKENS):
                    learn(part, min(MICROBATCH_TOKENS, total - done))
        return answered

    return step


def _process_seconds() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


sample: Callable[[list[list[int]], int], int] = {
    "ours": ours,
    "generate": generate,
    "vllm": vllm,
    "products": products,
    "products-step": products_of_a_step,
}[name]()


def step(number: int) -> dict[str, float]:
    """Sample the answers of one step."""
    ids = prompt_ids(number)
    began, cpu = time.perf_counter(), _process_seconds()
    tokens = sample(ids, number)
    seconds, cpu = time.perf_counter() - began, _process_seconds() - cpu
    return {"step_s": seconds, "cpu_s": cpu, "new_tokens": tokens}


serve(step)
