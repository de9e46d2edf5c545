"""Evaluations with several responses a prompt, of any model, and what decides over a run."""

import json
from dataclasses import replace

import pytest
import torch

from multitask_rl.cli import main
from multitask_rl.config.run import LoraConfig, ModelConfig, RolloutConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import load_actor
from multitask_rl.trainer import Trainer
from run_builders import ECHO, ECHO_WORLD, build_actor, run_config, train, undocumented, write_run

ANCHOR = "multitask_rl.algorithms.anchor:Anchor"
TASKS = """
tasks:
  copy: {dataset: copy.jsonl, rewards: [rewards.py:graded], primary_metric: graded}
  benchmark: {dataset: test.jsonl, rewards: [rewards.py:graded], evaluation_only: true}
"""
GRADED = """
from multitask_rl.contracts import PluginTraits


def graded(response, reference):
    return {"score": float(response[:1] == reference[:1]), "pred": response[:1]}


graded.traits = PluginTraits(low=0.0, high=1.0, isolate=False)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A tasks file with a task whose held-out rows are of the split test."""
    write_run(tmp_path, TASKS)
    (tmp_path / "rewards.py").write_text(GRADED)
    rows = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()[:12]]
    text = "".join(json.dumps({**row, "split": "test"}) + "\n" for row in rows)
    (tmp_path / "test.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_several_responses_a_prompt_are_recorded_and_a_test_split_decides_nothing(here):
    config = run_config(here, "out", 2)
    config = replace(config, tasks={"copy": {"eval_samples": 4}})
    trainer = Trainer.from_config(config)
    trainer.train()
    last = trainer.history[-1][1]
    assert len(last["copy"].values) == 8
    assert last["copy"].primary.n == 32
    one, four = last["copy"].metrics["pass@1"].mean, last["copy"].metrics["pass@4"].mean
    assert one == pytest.approx(last["copy"].primary.mean)
    assert one <= four
    assert 0.0 <= last["copy"].metrics["maj@4"].mean <= 1.0
    entries = trainer.parts.store.checkpoints.entries
    assert entries[2].score == last["copy"].primary.mean, "the best checkpoint does not read the test split"
    numbers = "".join((here / "out" / "metrics.jsonl").read_text())
    assert "guard/copy/" in numbers
    assert "guard/benchmark/" not in numbers
    assert '"task/benchmark/eval"' in numbers
    assert undocumented(here / "out") == set()
    guard = replace(config.guard, monitor_metrics=["benchmark"])
    with pytest.raises(ConfigError, match=r"The guard does not watch benchmark: .* split test"):
        Trainer.from_config(replace(config, guard=guard))


def test_the_first_response_does_not_depend_on_their_number(here):
    def values(samples):
        config = run_config(here, f"out{samples}", 1)
        return Trainer.from_config(replace(config, tasks={"copy": {"eval_samples": samples}})).evaluate()

    one, two = values(1)["copy"], values(2)["copy"]
    assert one.prompts == two.prompts
    assert all(b in (a / 2, (a + 1) / 2) for a, b in zip(one.values, two.values, strict=True))


def test_any_model_is_evaluated_and_two_are_compared_in_pairs(here, capsys):
    build_actor(seed=1).save(here / "other")
    keys = ["eval.num_prompts=12", "--samples", "2", "rollout.max_new_tokens=4", "scoring.num_workers=1"]
    assert main(["eval", "actor", "tasks.yaml", "--other", "other", "--json", *keys]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["models"].keys() == {"actor", "other"}
    row = found["difference"]["tasks"]["copy"]
    base, other = (found["models"][m]["copy"] for m in ("actor", "other"))
    assert row["paired"]
    assert row["delta"] == pytest.approx(other["mean"] - base["mean"])
    assert row["low"] <= row["delta"] <= row["high"]
    assert base["metrics"]["pass@2"]["n"] == len(base["values"]) == 8
    assert not (here / "runs").exists()


def test_a_second_model_that_cannot_be_evaluated_does_not_cost_the_first_ones_results(here, capsys):
    build_actor(seed=1).save(here / "weightless")
    for weights in (here / "weightless").glob("*.safetensors*"):
        weights.unlink()
    keys = ["eval.num_prompts=2", "rollout.max_new_tokens=4", "scoring.num_workers=1"]
    assert main(["eval", "actor", "tasks.yaml", "--other", "weightless", "--json", *keys]) == 2
    shown = capsys.readouterr()
    assert "model.name_or_path 'weightless' is a directory without a loadable" in shown.err
    found = json.loads(shown.out.splitlines()[-1])
    assert found["models"]["actor"]["copy"]["n"] == 2
    assert found["difference"] is None


def test_a_misspelt_second_model_is_refused_before_the_first_is_evaluated(here, capsys):
    assert main(["eval", "actor", "tasks.yaml", "--other", "absent", "--json", "scoring.num_workers=1"]) == 2
    shown = capsys.readouterr()
    assert "model.name_or_path 'absent' is neither a directory" in shown.err
    assert not shown.out


def test_two_models_are_measured_on_the_same_texts_of_an_anchor(here, capsys):
    """A model that is surer of its own words is not better for it, and none is its own beginning."""
    (here / "texts.yaml").write_text(f"""
tasks:
  chat: {{type: "{ANCHOR}", dataset: digit.jsonl}}
  kept: {{type: "{ANCHOR}", dataset: digit.jsonl, rewards: [rewards.py:graded], solved_at: 1}}
""")
    surer = build_actor(seed=0)
    with torch.no_grad():
        surer.model.model.norm.weight.mul_(3.0)
    surer.save(here / "surer")
    keys = ["eval.num_prompts=24", "rollout.max_new_tokens=4", "scoring.num_workers=1", "--json"]
    assert main(["eval", "actor", "texts.yaml", "--other", "surer", "--split", "test", *keys]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["difference"]["tasks"]["chat"]["paired"]
    assert found["difference"]["tasks"]["chat"]["verdict"] != "better"
    first, second = (found["models"][name]["kept"]["metrics"] for name in ("actor", "surer"))
    assert "turnover" not in first
    assert "turnover" in second
    assert "kl" not in {*first, *second}
    surer.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}+"
    surer.save(here / "instructed")
    assert main(["eval", "actor", "texts.yaml", "--other", "instructed", *keys]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "turnover" not in found["models"]["instructed"]["kept"]["metrics"], (
        "other prompts have none before"
    )


def test_a_run_or_its_checkpoint_is_sampled_as_the_run_is(here, capsys):
    config = run_config(here, "out", 1, rollout=RolloutConfig(max_new_tokens=3))
    train(replace(config, eval=replace(config.eval, num_prompts=4, temperature=0.5)))
    checkpoint = "out/checkpoints/step_00000001"
    told = "rollout.max_new_tokens=3, rollout.top_p=1.0, rollout.top_k=0, eval.temperature=0.5; keys"
    keys = ["eval.num_prompts=4", "scoring.num_workers=1", "--json"]

    def longest(*arguments):
        assert main(["eval", *arguments, "tasks.yaml", *keys]) == 0
        shown = capsys.readouterr()
        (found,) = json.loads(shown.out.splitlines()[-1])["models"].values()
        return found["copy"]["metrics"]["length"]["mean"], shown.err

    length, shown = longest(checkpoint)
    assert length <= 3
    assert told in shown
    keys += ["rollout.max_new_tokens=8"]
    length, shown = longest("out")
    assert length > 3
    assert "max_new_tokens=8, " in shown
    assert "eval.temperature=0.5" in shown
    (here / "rewards.py").write_text(
        f"import shutil\nshutil.rmtree({str(here / 'out' / 'checkpoints')!r})\n" + GRADED
    )
    assert main(["eval", "out", "tasks.yaml"]) == 1
    assert "was removed while it was read: its run goes on" in capsys.readouterr().err


def test_adapters_are_evaluated_on_the_model_below_them(here, capsys):
    pytest.importorskip("peft")
    config = ModelConfig(name_or_path="actor", lora=LoraConfig(rank=2))
    load_actor(config, "cpu").save(here / "adapters")  # new ones change nothing
    keys = ["eval.num_prompts=4", "rollout.max_new_tokens=4", "scoring.num_workers=1"]
    assert main(["eval", "actor", "tasks.yaml", "--other", "adapters", "--json", *keys]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert found["actor"]["copy"]["values"] == found["adapters"]["copy"]["values"]


def test_a_file_of_benchmarks_alone_is_evaluated_greedily_but_not_trained(here, capsys):
    (here / "all.yaml").write_text(TASKS.replace("  copy: {", "  copy: {evaluation_only: true, "))
    keys = ["eval.temperature=0", "rollout.max_new_tokens=4", "scoring.num_workers=1", "eval.num_prompts=4"]
    assert main(["eval", "actor", "all.yaml", *keys]) == 0
    shown = capsys.readouterr().out
    assert "benchmark" in shown
    assert "pass@" not in shown
    config = replace(run_config(here, "out", 1), tasks_file=str(here / "all.yaml"))
    with pytest.raises(ConfigError, match="nothing would be trained"):
        Trainer.from_config(config).train()


def test_models_that_cannot_be_evaluated_are_refused_in_words(here, capsys):
    (here / "run" / "checkpoints").mkdir(parents=True)
    for name, base in (("nameless", ""), ("orphan", "absent/model")):
        (here / name).mkdir()
        (here / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    refused = {
        "run": "without a checkpoint",
        "nameless": "name no model",
        "orphan": "that they name, 'absent/model'",
    }
    for model, told in refused.items():
        assert main(["eval", model, "tasks.yaml"]) == 2
        assert told in capsys.readouterr().err
    assert main(["eval", "actor", "tasks.yaml", "--split", "dev"]) == 2
    assert "no rows of split 'dev'" in capsys.readouterr().err
    assert main(["eval", "actor", "tasks.yaml", "--samples=2", "eval.temperature=0"]) == 2
    assert "are all the same" in capsys.readouterr().err
    assert main(["eval", "actor", "tasks.yaml", "--other", "actor"]) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["actor", "tasks.yaml", "--sample", "2"], "unknown option '--sample'; did you mean '--samples'?"),
        (["actor", "tasks.yaml", "--jason"], "did you mean '--json'?"),
        (["output_dir=out", "--json"], "--json needs a model and a tasks file: multitask-rl eval RUN TASKS"),
        (["output_dir=out", "--split=test"], "--split needs a model and a tasks file"),
        (["output_dir=out", "--other", "actor"], "--other needs a model and a tasks file"),
    ],
)
def test_an_option_that_eval_does_not_take_is_refused_with_the_right_form(arguments, told, here, capsys):
    Trainer.from_config(run_config(here, "out", 1)).train()
    assert main(["eval", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_named_split_is_evaluated_without_advice_on_training(here, capsys, caplog):
    rows = [json.loads(line) for line in (here / "copy.jsonl").read_text().splitlines()]
    parts = ("train", "validation", "test", "test")
    text = "".join(json.dumps({**row, "split": parts[i % 4]}) + "\n" for i, row in enumerate(rows))
    (here / "copy.jsonl").write_text(text)
    keys = ["eval.num_prompts=999", "rollout.max_new_tokens=4", "scoring.num_workers=1"]
    assert main(["eval", "actor", "tasks.yaml", "--split", "test", "--json", *keys]) == 0
    written = capsys.readouterr()
    found = json.loads(written.out.splitlines()[-1])["models"]["actor"]
    assert found["copy"]["n"] == sum(i % 4 > 1 for i in range(len(rows)))
    assert "only reported" not in caplog.text + written.err


def test_an_evaluation_speaks_of_no_gradient_and_wants_prompts(here, caplog):
    config = run_config(here, "out", 1)
    unscaled = {"type": "grpo", "algorithm_config": {"normalisation": "none"}}
    second = {"dataset": "copy.jsonl", "rewards": ["rewards.py:graded"]}
    config = replace(config, tasks={"copy": unscaled, "second": second})
    Trainer.from_config(config).evaluate()
    assert "shared gradient" not in caplog.text
    with pytest.raises(ConfigError, match=r"eval\.num_prompts: 0 held-out prompts"):
        Trainer.from_config(replace(config, eval=replace(config.eval, num_prompts=0))).evaluate()
    Trainer.from_config(config).train()
    assert "weigh less in the shared gradient" in caplog.text


def test_held_out_prompts_that_do_not_fit_are_told_and_fail_no_episode(here, caplog):
    episodes = ECHO.replace("digit.jsonl", "test.jsonl") + "    evaluation_only: true\n"
    (here / "tasks.yaml").write_text(TASKS + episodes)
    (here / "worlds.py").write_text(ECHO_WORLD)
    rows = [json.loads(line) for line in (here / "test.jsonl").read_text().splitlines()]
    rows[0]["prompt"] = "a" * 40
    (here / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(here, "out", 1, rollout=RolloutConfig(max_new_tokens=4, max_prompt_tokens=8))
    found = Trainer.from_config(config).evaluate()
    told = "its held-out prompts of more than 8 tokens lose their beginning: 1 of 12."
    for name in ("benchmark", "echo"):
        assert (found[name].num_failed, len(found[name].values)) == (0, len(rows))
        assert f"task {name}: {told}" in caplog.text
    events = train(config).events
    assert {event.task for event in events if told in event.reason} == {"benchmark", "echo"}


@pytest.mark.parametrize("said", ["b", "b" * 20])
def test_held_out_prompts_that_a_world_makes_too_long_are_told_once(here, said):
    episodes = ECHO.replace("digit.jsonl", "test.jsonl") + "    evaluation_only: true\n"
    (here / "tasks.yaml").write_text(TASKS + episodes)
    world = ECHO_WORLD.replace("return []", f"return [{{'role': 'user', 'content': {said!r}}}]")
    (here / "worlds.py").write_text(world)
    config = run_config(here, "out", 1, rollout=RolloutConfig(max_new_tokens=4, max_prompt_tokens=8))
    events = train(replace(config, eval=replace(config.eval, every=1))).events
    told = [event.task for event in events if "what its environment adds" in event.reason]
    assert told == (["echo"] if len(said) > 8 else [])
