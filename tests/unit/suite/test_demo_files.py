"""The demo's files agree with the suite they describe."""

import sys
from pathlib import Path
from string import Template

import yaml

from multitask_rl.scoring.adapt import find_plugin
from multitask_rl_tasks.suite import SUITE

DEMO = Path(__file__).parents[3] / "examples" / "demo"


def tasks():
    text = (DEMO / "tasks.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(Template(text).substitute(directory="/prepared"))["tasks"]


def test_the_demo_has_every_task_type_of_the_reference_and_a_verifiable_one():
    assert {name: task["type"] for name, task in tasks().items()} == {
        "preference": "ppo",
        "code": "reward_conditioned",
        "safe": "constrained_decoding",
        "arithmetic": "grpo",
    }


def test_prompts_and_limits_are_those_the_actor_was_warmed_up_on():
    for name, task in tasks().items():
        assert task.get("prompt", "{prompt}") == SUITE[name].template
        assert task["sampling"]["max_new_tokens"] == SUITE[name].max_new_tokens


def test_held_out_rates_have_a_range_so_that_the_mean_over_tasks_counts_them():
    for name, metric in (("safe", "appropriate"), ("arithmetic", "exact_match")):
        rewards = [r if isinstance(r, dict) else {"plugin": r} for r in tasks()[name]["rewards"]]
        (reward,) = (r for r in rewards if r.get("name", r["plugin"]) == metric)
        traits = find_plugin("reward", reward["plugin"], "demo").traits
        assert tuple(reward.get("range", (traits.low, traits.high))) == (0, 1)


def test_the_warm_start_knows_the_control_tokens_of_the_conditioned_task(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    import prepare

    assert tasks()["code"]["algorithm_config"]["quantiles"] == prepare.QUANTILES
    assert prepare.ACTOR.tasks["code"].control_levels == prepare.QUANTILES
    assert set(prepare.ACTOR.tasks) == set(tasks())
    sys.modules.pop("prepare")
