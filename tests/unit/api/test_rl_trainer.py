"""Front doors on tiny models: what they ask of the trainer, and what they refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from numpy import int64
from transformers import AutoModelForCausalLM

from model_builders import build_actor, build_model, build_tokenizer
from multitask_rl import PPOConfig, PPORoleUpdater, PPOTrainer, RLTrainer, Trainer, get_actor_critic
from multitask_rl.config import get_ppo_default_config
from multitask_rl.config.run import BatchConfig, LoraConfig, ModelConfig, RolloutConfig, RunConfig
from multitask_rl.curriculum.scheduler import SchedulerConfig
from multitask_rl.curriculum.uniform import Uniform
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.rollout.hf import HFEngine
from plain_rewards import digits

PROMPTS = [f"{i}+{i}=" for i in range(8)]


def config(tmp_path: Path, **changes: object) -> PPOConfig:
    own = {"max_steps": 2, "batch_size": 4, "lr": 1e-3, "output_dir": str(tmp_path / "run")}
    return PPOConfig(**{**own, "rollout": {"response_length": 4}, **changes})  # type: ignore[arg-type]


def test_a_model_learns_from_prompts_and_a_local_function_and_goes_on_in_a_second_call(
    tmp_path: Path,
) -> None:
    threshold = 0.5  # a closure: it cannot be imported by a worker
    model = build_model()
    before = model.state_dict()["model.norm.weight"].clone()
    trainer = RLTrainer(
        model,
        build_tokenizer(),
        algorithm="grpo",
        config=config(tmp_path, group_size=2, output_dir=""),
        reward_fn=lambda texts: [float(score > threshold) for score in digits(texts)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = trainer.train(PROMPTS)
        first = trainer.run
        trainer.train(PROMPTS)
    assert set(found) == {"prompts"}
    assert trainer.run is not first
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert trainer.actor.model is model, "the model is trained in place"
    assert not torch.equal(before, model.state_dict()["model.norm.weight"])
    assert trainer.run is not None
    assert trainer.run.config.batch.prompts_per_step == 2


def test_what_the_rows_and_the_length_mean_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RLTrainer(build_model(), build_tokenizer(), config=config(tmp_path), reward_fn=digits).open(PROMPTS)
    for told in ("the held-out rows are those that are trained on", "positions that the model covers"):
        assert caplog.text.count(told) == 1


def test_steps_by_hand_and_stages_of_a_run_that_is_opened(tmp_path: Path) -> None:
    updater = PPORoleUpdater(
        build_model(),
        overlap_comm=True,
        config=config(tmp_path),
        prompts=PROMPTS,
        tokenizer=build_tokenizer(),
        reward_fn=digits,
    )
    reports = [updater.update() for _ in range(2)]
    assert [report.step for report in reports] == [0, 1]
    assert len(repr(reports[0])) < 2000, "a cell of a notebook shows it"
    assert updater.trainer.config.rollout.max_staleness == 1
    updater.close()
    with pytest.raises(ConfigError, match="engine must be 'hybrid' or 'vllm'"):
        PPORoleUpdater(engine="megatron")


def test_an_updater_keeps_the_settings_that_it_is_given(tmp_path: Path) -> None:
    own = config(tmp_path, hybrid_engine={"overlap": True})
    updater = PPORoleUpdater(build_actor(), config=own, prompts=PROMPTS, reward_fn=digits)
    assert updater.trainer.config.rollout.max_staleness == 1
    updater.close()
    assert PPORoleUpdater(build_actor(), "vllm", config=own).config.rollout.engine == "vllm"  # type: ignore[union-attr]
    assert own == config(tmp_path, hybrid_engine={"overlap": True}), "the caller's settings are not changed"


def test_parts_of_another_type_are_refused_when_they_are_given(tmp_path: Path) -> None:
    with RLTrainer(build_actor(), config=config(tmp_path), reward_fn=digits).open(PROMPTS) as run:
        with pytest.raises(ConfigError, match="expected a DynamicTaskWeightScheduler, got 'uniform'"):
            run.set_task_scheduler("uniform")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a Guard, got None"):
            run.add_guard(None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a Stage, got <function"):
            run.insert_stage(digits, after="rewards")  # type: ignore[arg-type]
        assert run.train_step().step == 0, "the run goes on as it was"


def test_the_nested_settings_become_a_run() -> None:
    settings = get_ppo_default_config()
    settings.update(
        rollout={
            "seq_len": 512,
            "response_length": 128,
            "batch_size_per_gpu": 8,
            "micro_batch_size_per_gpu": 2,
        },
        actor_train={"seq_len": 512, "micro_batch_size_per_gpu": 4, "fsdp": {"enabled": True}},
        critic_train={"seq_len": 512, "gradient_checkpointing": True, "model_name": "other"},
        hybrid_engine={"overlap": True, "chunk_size": 64},
        mini_batch_size=4,
        run={"eval": {"every": 3}},
    )
    run = PPOTrainer(settings).config.run_config(num_prompts=100, num_epochs=2)  # type: ignore[union-attr]
    assert (run.rollout.max_prompt_tokens, run.rollout.max_new_tokens) == (384, 128)
    assert (run.rollout.max_batch_tokens, run.batch.tokens_per_microbatch) == (1024, 2048)
    assert (run.batch.prompts_per_step, run.batch.num_minibatches, run.max_steps) == (8, 2, 26)
    assert (run.rollout.max_staleness, run.rollout.prefill_tokens, run.eval.every) == (1, 64, 3)
    assert (run.critic.trunk, run.critic.name_or_path) == ("separate", "other")
    assert run.critic.gradient_checkpointing
    assert not run.model.gradient_checkpointing
    assert run.device_map == {}, "a single device holds all of the weights"


def test_a_short_model_cuts_the_sequence_length(caplog: pytest.LogCaptureFixture) -> None:
    run = PPOConfig(seq_len=8192).run_config(num_prompts=10, max_length=512)
    assert run.rollout.max_prompt_tokens + run.rollout.max_new_tokens == 512
    assert "cut to the 512 positions" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batchsize": 3}, "unknown key 'batchsize'; did you mean 'batch_size'"),
        ({"lr": -1}, "lr must be"),
        ({"rollout": {"seq_len": 64}, "actor_train": {"seq_len": 32}}, "actor_train.seq_len=32 is below"),
        ({"rollout": {"seq_len": 64, "response_length": 64}}, "leaves no room for a prompt"),
        ({"run": {"batch": {"groupsize": 2}}}, "unknown key 'groupsize'"),
    ],
)
def test_wrong_settings_say_where_and_what(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(given).config.run_config(num_prompts=4)  # type: ignore[union-attr]


def test_what_is_missing_is_said_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no tasks: give train"):
        PPOTrainer().train()
    with pytest.raises(ConfigError, match="needs reward_fn"):
        RLTrainer(model_name="nowhere").train(PROMPTS)
    with pytest.raises(ConfigError, match="either model or model_name"):
        RLTrainer(build_model(), model_name="x")
    with pytest.raises(ConfigError, match="no tokenizer comes with the model"):
        RLTrainer(build_model(), reward_fn=digits).train(PROMPTS)
    with pytest.raises(ConfigError, match="must be a causal language model of transformers"):
        RLTrainer(torch.nn.Linear(2, 2), reward_fn=digits).train(PROMPTS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a causal language model of transformers .*got int"):
        RLTrainer(5, reward_fn=digits).train(PROMPTS)  # type: ignore[arg-type]
    tagged = [{"task": name, "prompt": "a"} for name in ("x", "y")]
    with pytest.raises(ConfigError, match="the rows name 2 tasks"):
        RLTrainer(build_model(), build_tokenizer(), reward_fn=digits).train(tagged)
    with pytest.raises(DataError, match=r"row \{'text': 'a'\} of the rows given lacks prompt"):
        RLTrainer(build_model(), build_tokenizer(), reward_fn=digits).train([{"text": "a"}])
    with pytest.raises(DataError, match=r"IterableDatasetDict.*, got int"):
        RLTrainer(build_model(), build_tokenizer(), reward_fn=digits).train(5)


@pytest.mark.parametrize("split", ["train", "test", "train[:8]"])
def test_few_rows_of_one_split_are_all_trained_on_and_evaluated(tmp_path: Path, split: str) -> None:
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS], split=split)
    trainer = RLTrainer(build_model(), build_tokenizer(), config=config(tmp_path), reward_fn=digits)
    with trainer.open(rows) as run:
        assert [len(part) for part in run.plan.rows["prompts"]] == [8, 8]


def test_the_variable_that_cuts_runs_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = RLTrainer(build_model(), build_tokenizer(), config=config(tmp_path), reward_fn=digits)
    monkeypatch.setenv("MULTITASK_RL_MAX_STEPS", "few")
    with pytest.raises(ConfigError, match="MULTITASK_RL_MAX_STEPS must be a whole number >= 1, got"):
        trainer.open(PROMPTS)
    monkeypatch.setenv("MULTITASK_RL_MAX_STEPS", "1")
    with trainer.open(PROMPTS) as run:
        assert run.config.max_steps == 1


def test_a_run_configuration_is_taken_as_it_is(tmp_path: Path) -> None:
    run = RunConfig(output_dir=str(tmp_path / "own"), max_steps=1)
    run.batch.prompts_per_step, run.batch.group_size, run.rollout.max_new_tokens = 2, 2, 4
    run.tracking.trackers = ["jsonl"]
    trainer = RLTrainer(build_model(), build_tokenizer(), algorithm="grpo", config=run, reward_fn=digits)
    trainer.train(PROMPTS)
    assert (tmp_path / "own" / "metrics.jsonl").is_file()


def test_the_seed_of_the_run_is_that_of_its_adapters(tmp_path: Path) -> None:
    build_actor().save(tmp_path / "model")

    def adapters(seed: int) -> dict[str, torch.Tensor]:
        model = ModelConfig(name_or_path=str(tmp_path / "model"), lora=LoraConfig(rank=2))
        actor = RLTrainer(config=RunConfig(model=model, seed=seed, device_map={"actor": "cpu"})).actor
        return {name: p for name, p in actor.model.named_parameters() if "lora_A" in name}

    first, again, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_an_engine_that_shares_the_weights_is_not_overlapped_with_their_update(tmp_path: Path) -> None:
    actor = build_actor()
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0)
    trainer = RLTrainer(actor, config=config(tmp_path), reward_fn=digits, engine=engine).open(PROMPTS)
    with pytest.raises(ConfigError, match=r"an engine given from Python .*enable_3d_hybrid_engine"):
        trainer.enable_3d_hybrid_engine()
    assert trainer.config.rollout.max_staleness == 0
    assert trainer.train_step().step == 0
    trainer.close()


def test_settings_of_an_engine_beside_an_engine_are_refused(tmp_path: Path) -> None:
    actor = build_actor()
    run = RunConfig(
        output_dir=str(tmp_path / "own"), rollout=RolloutConfig(engine_config={"weights": "actor"})
    )
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0)
    with pytest.raises(ConfigError, match=r"rollout.engine_config \(weights\)"):
        RLTrainer(actor, config=run, reward_fn=digits, engine=engine).open(PROMPTS)


def test_torchrun_keeps_the_devices_that_were_asked_for_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multitask_rl.trainer.torchrun_size", lambda: 2)
    found = []
    for own in ({"actor": "cpu:0-1 sharded"}, {}):
        actor = build_actor()
        actor.device_map = own
        trainer = RLTrainer(actor, config=config(tmp_path), reward_fn=digits).open(PROMPTS)
        found.append(trainer.config.device_map["actor"])
        trainer.close()
    assert found == ["cpu:0-1 sharded", "cpu:0-1"]


def test_a_path_is_a_model_and_a_directory_and_a_name_is_no_tokenizer(tmp_path: Path) -> None:
    build_actor().save(tmp_path / "actor")
    own = PPOConfig(output_dir=tmp_path / "run", rollout={"response_length": 4})  # type: ignore[arg-type]
    trainer = RLTrainer(tmp_path / "actor", config=own, reward_fn=digits)
    with trainer.open(PROMPTS) as run:
        assert run.config.output_dir == str(tmp_path / "run")
    assert get_actor_critic(tmp_path / "actor")[0].config.name_or_path == str(tmp_path / "actor")
    assert RunConfig(output_dir=tmp_path).output_dir == str(tmp_path)  # type: ignore[arg-type]
    for give in (
        lambda: RLTrainer(str(tmp_path / "actor"), "gpt2").actor,  # type: ignore[arg-type]
        lambda: RLTrainer(build_model(), "gpt2").actor,  # type: ignore[arg-type]
    ):
        with pytest.raises(
            ConfigError, match=r"tokenizer: .*got 'gpt2'; give AutoTokenizer\.from_pretrained"
        ):
            give()


def test_a_run_records_the_model_that_it_trains_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    for name in ("one", "other"):
        build_actor().save(tmp_path / name)
    for given in (
        str(tmp_path / "one"),
        build_actor(),
        AutoModelForCausalLM.from_pretrained(tmp_path / "one"),
    ):
        trainer = RLTrainer(given, config=config(tmp_path, output_dir=str(tmp_path / "x")), reward_fn=digits)
        with trainer.open(PROMPTS) as run:
            assert run.config.model.name_or_path == trainer.actor.config.name_or_path
    RLTrainer(tmp_path / "one", config=config(tmp_path), reward_fn=digits).train(PROMPTS)
    with pytest.raises(
        ConfigError, match=r"was made with model.name_or_path='.*one', and now it is '.*other'"
    ):
        RLTrainer(tmp_path / "other", config=config(tmp_path, max_steps=3), reward_fn=digits).train(PROMPTS)


def test_what_is_saved_into_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = RLTrainer(build_model(), build_tokenizer())
    with pytest.raises(ConfigError, match=r"save: .*file' is a file; give a directory"):
        trainer.save(tmp_path / "file")
    trainer.save(tmp_path / "new" / "trained")
    assert (tmp_path / "new" / "trained" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (lambda: RLTrainer("gpt2", config="run.yaml"), "config: expected a mapping or a PPOConfig, got 'run"),
        (lambda: Trainer(config="run.yaml"), "config: expected a mapping or a RunConfig, got 'run.yaml'"),
        (lambda: RLTrainer("gpt2").train(PROMPTS, num_epochs=1.5), "num_epochs must be a whole number >= 1"),
        (lambda: RunConfig(eval=None), "RunConfig.eval must be of type EvalConfig, got None"),
        (lambda: BatchConfig(group_size=int64(4)), r"BatchConfig.group_size must be a whole number, got np"),
        (lambda: SchedulerConfig(policy=Uniform), "SchedulerConfig.policy must be a text, got <class"),
    ],
)
def test_settings_of_another_type_are_told_by_their_name(give: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        give()


def test_a_model_of_which_all_is_frozen_is_not_trained_in_silence(tmp_path: Path) -> None:
    model = build_model().requires_grad_(False)
    trainer = RLTrainer(model, build_tokenizer(), config=config(tmp_path), reward_fn=digits)
    with pytest.raises(ConfigError, match=r"no parameter of the actor is trainable .*requires_grad_\(True\)"):
        trainer.train(PROMPTS)


def test_a_name_is_a_model_and_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tasks have rewards of their own: leave reward_fn out"):
        RLTrainer("gpt2", tasks={"a": {"rewards": ["length"]}}, reward_fn="length")
    with pytest.raises(ConfigError, match="tasks have rows of their own"):
        RLTrainer("gpt2", tasks={"a": {"rewards": ["length"]}}).open(["x"])
    build_actor().save(tmp_path / "actor")
    named = RLTrainer(str(tmp_path / "actor"), reward_fn="length")
    assert named.actor.config.name_or_path == str(tmp_path / "actor")
    with pytest.raises(ConfigError, match=r"got the name 'gpt2'; give a name as model\.name_or_path"):
        Trainer(actor="gpt2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="output_dir is empty"):
        Trainer(config={"tasks": {"a": {"dataset": "a.jsonl", "rewards": ["length"]}}, "output_dir": ""})
