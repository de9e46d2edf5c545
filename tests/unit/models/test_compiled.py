"""Compiled blocks: the same numbers, for sampling and for learning."""

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from model_builders import build_model
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import compile_blocks
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9, 10, 11, 12], [13, 14], [13, 14]]
RESPONSES = [[3 + (7 * i + j) % 40 for j in range(20 + 9 * i)] for i in range(5)]


def learn(model, layout):
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout=layout, pad_token_id=0)
    model.zero_grad()
    out = forward_tokens(model, batch, [SamplingParams() for _ in batch.indices])
    (out.logprobs @ torch.linspace(-1, 2, len(out.logprobs))).backward()
    return out.logprobs.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
@inductor.patch(compile_threads=1)  # processes that compile would each import torch
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # not again for every shape
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_say_what_the_model_says():
    plain = build_model()
    fused = copy.deepcopy(plain)
    assert compile_blocks(fused) == 7  # two layers of two norms and one feed-forward block, and the last norm
    counters.clear()
    for layout in ("bucketed", "shared"):
        (logprobs, gradients), (ours, own_gradients) = learn(plain, layout), learn(fused, layout)
        torch.testing.assert_close(ours, logprobs, atol=1e-5, rtol=1e-5)
        for one, other in zip(own_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    requests = [
        GenerationRequest(prompt_ids=ids, sampling=SamplingParams(max_new_tokens=9), seeds=[1, 2])
        for ids in PROMPTS
    ]
    responses = [
        [g.response_ids for group in engine.generate(requests) for g in group]
        for engine in (HFEngine(m, eos_token_ids=[1], pad_token_id=0) for m in (plain, fused))
    ]
    assert responses[0] == responses[1]
    assert counters["stats"]["unique_graphs"] >= 2  # something was compiled
    assert set(fused.state_dict()) == set(plain.state_dict())


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"Linear has no module .* model\.compile=false"):
        compile_blocks(torch.nn.Linear(2, 2))


def test_a_missing_compiler_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"C\+\+ compiler .* neither g\+\+ nor clang"):
        compile_blocks(build_model())
