"""Runs on two simulated CUDA devices (``tests/fake_cuda``): mistakes of devices are found without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MISTAKES = """
import os, sys, torch
here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
generator = torch.Generator("cuda").manual_seed(0)
whole = torch.ones(2, 2, dtype=torch.long, device="cuda")

def in_a_fork():
    if not os.fork():
        try:
            there + 1
        except RuntimeError as error:
            os._exit("forked" in str(error))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]) == 1:
        raise RuntimeError("refused")

mistakes = [
    lambda: here + there, lambda: there[:, 0].add_(here[:, 0]), lambda: there.to("cuda:1") @ there,
    lambda: torch.ones(1, device="cuda:2"), lambda: torch.nn.Linear(2, 2)(there), lambda: there.numpy(),
    lambda: torch.rand(2, generator=generator), lambda: whole @ whole, in_a_fork,
    lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
]
for number, mistake in enumerate(mistakes):
    try:
        mistake()
    except (RuntimeError, TypeError):
        continue
    sys.exit(f"mistake {number} was not seen")

assert (here + there.cpu()).sum() == 8 and (there * torch.tensor(2.0)).device.type == "cuda"
assert there[torch.tensor([0])].tolist() == [[1.0, 1.0]]
copied = there.to("cpu", non_blocking=True)
assert copied.isnan().all()
torch.cuda.synchronize()
assert torch.equal(copied, here) and torch.empty(2, device="cuda").isnan().all()

state = torch.cuda.get_rng_state()
drawn = [torch.rand(3, device="cuda").tolist() for _ in range(2)]
torch.cuda.set_rng_state(state)
assert torch.rand(3, device="cuda").tolist() == drawn[0] != drawn[1]

model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
model[1].weight = model[0].weight
weight = model.to("cuda")[0].weight
assert weight is model[1].weight and weight.device.type == "cuda"
model(torch.tensor([1, 2], device="cuda")).logsumexp(-1).sum().backward()
before = weight.tolist()
torch.optim.AdamW([weight], lr=0.1).step()
assert weight.grad.device.type == "cuda" and weight.tolist() != before
"""


def on_fake_devices(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/fake_cuda"), str(ROOT)])}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_mistakes_that_a_gpu_refuses_are_refused_and_the_rest_is_computed():
    code, said = on_fake_devices("-c", MISTAKES)
    assert code == 0, said


# a float32 actor, a model that ties no weights and one that begins on the device show nothing of their own
LEFT_OUT = "settings0 or settings1 or False or cuda"


@pytest.mark.timeout(600)
def test_what_needs_a_gpu_has_all_its_tensors_on_it():
    command = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not vllm"]
    files = [f"tests/gpu/test_gpu_{name}.py" for name in ("run", "engines", "ranks")]
    code, said = on_fake_devices(*command, "-k", f"not ({LEFT_OUT})", *files)
    assert code == 0, said
    assert " passed" in said
