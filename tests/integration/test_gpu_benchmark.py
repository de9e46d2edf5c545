"""The benchmark of a GPU, tiny: the same command on a CPU and, where there is one, on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forked import run_forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = "--actor tiny --workload uniform --steps 1 --dtype float32 --peer none --engines hf"
TINY_OVERLAP = "--delays 0 --block 1 --overlap-tokens 8"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_command_measures_and_its_result_becomes_a_table(tmp_path, device, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    real = subprocess.run

    def run(command, **how):
        """Fork what imports everything; the sides of a step stay processes of their own."""
        if command[0] != sys.executable:
            return real(command, **how)
        done = run_forked(*command[1:], cwd=tmp_path, timeout=580)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    command = ["gpu.py", *TINY.split(), *TINY_OVERLAP.split(), "--device", device]
    command += ["--peak-tflops", "0.1", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", command)
    gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    (steps,) = result["steps"]
    assert set(steps["sides"]) == {"ours", "limit"}
    for name, side in steps["sides"].items():
        assert side["new_tokens"] == 32 * 8 * 24
        assert 0 < side["gen_s"] + side["train_s"] < side["step_s"]
        assert set(steps["utilisation"][name]) == {"sampling", "learning", "step"}
        assert ("peak_cuda_mib" in side) == (device == "cuda")
    assert steps["sides"]["ours"]["weights_s"] < steps["sides"]["ours"]["step_s"]
    busy = result["overlap"]["hf"]["0 s"]["max_staleness 1"]["busy"]
    assert set(busy) == {"rollout", "rewards", "advantages", "update"}
    assert bool(result["machine"].get("gpu")) == (device == "cuda")
    from tables import render

    lines = render(tmp_path).splitlines()
    assert any(line.startswith("| ours, `hf` |") for line in lines)
    assert any(line.startswith("| 0 s | 1 |") for line in lines)


def test_what_was_measured_is_kept_when_a_later_figure_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    def measure(script, arguments):
        if script == "pipeline.py":
            raise subprocess.CalledProcessError(1, script)
        return {"ratios": {"limit": 2.0}}

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--json", str(tmp_path / "gpu.json")])
    with pytest.raises(subprocess.CalledProcessError):
        gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["steps"] == [{"ratios": {"limit": 2.0}}]
    assert result["machine"]["cores"]
