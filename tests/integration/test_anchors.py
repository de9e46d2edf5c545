"""Anchors: forgetting is measured on texts and prompts that no task trains on."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from multitask_rl.cli import main
from multitask_rl.config.run import EvalConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.errors import ConfigError
from multitask_rl.statistics.definitions import is_comparable, measured
from multitask_rl.trainer import Trainer
from run_builders import build_actor, run_config, undocumented, write_run

ANCHOR = "multitask_rl.algorithms.anchor:Anchor"
TASKS = f"""
tasks:
  copy: {{dataset: copy.jsonl, rewards: [rewards.py:starts_right]}}
  wiki: {{type: "{ANCHOR}", dataset: texts.jsonl, prompt: "", answer: "{{text}}"}}
  chat: {{type: "{ANCHOR}", dataset: digit.jsonl}}
  kept: {{type: "{ANCHOR}", dataset: digit.jsonl, rewards: [rewards.py:starts_right], solved_at: 1}}
"""
SCORED = "answer: '{reference}{prompt}', rewards: [rewards.py:starts_right]"
TEXTS = ["the quick brown fox", "a dog", "1 + 1 = 2", "more than the model has positions " * 9]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps, its guard watching anchors."""
    directory = tmp_path_factory.mktemp("anchors")
    write_run(directory, TASKS)
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return directory, *_run(directory, "whole", 4)


def _run(directory, output, steps):
    config = run_config(directory, output, steps)
    watched = ["copy", "wiki", "chat/kl", "kept/turnover"]
    trainer = Trainer.from_config(replace(config, guard=replace(config.guard, monitor_metrics=watched)))
    trainer.train()
    return trainer, dict(trainer.history)


def test_loss_and_kl_of_texts_are_those_of_a_naive_loop(finished):
    _, trainer, history = finished
    base, actor, tokenizer = build_actor().model, trainer.actor.model, trainer.actor.tokenizer
    for step, model in ((0, base), (4, actor)):
        found = history[step]["wiki"]
        for text, loss, kl in zip(TEXTS, found.values, found.metrics["kl"].values, strict=True):
            ids = torch.tensor([tokenizer(text)["input_ids"]])[:, : trainer.actor.max_length]
            with torch.no_grad():
                p, q = (m(ids).logits[0, :-1].log_softmax(-1) for m in (base, model))
            assert loss == pytest.approx(-q.gather(-1, ids[0, 1:, None]).mean().item(), abs=1e-5)
            assert kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), abs=1e-5)
    assert history[4]["wiki"].metrics["kl"].mean > 1e-6
    assert history[0]["wiki"].prompts == history[4]["wiki"].prompts


def test_loss_over_other_texts_is_another_metric_also_where_responses_are_scored(tmp_path):
    def measures(keys):
        write_run(tmp_path, f"tasks:\n  kept: {{type: anchor, dataset: copy.jsonl, {SCORED}{keys}}}\n")
        with Trainer.from_config(run_config(tmp_path, "out", 1)) as trainer:
            found = trainer.evaluate()["kept"]
        return [measured(found, metric) for metric in ("", "turnover", "loss")]

    before, same = measures(""), measures("")
    other = measures(", algorithm_config: {max_tokens: 1}")
    assert [is_comparable(*pair) for pair in zip(before, same, strict=True)] == [True, True, True]
    assert [is_comparable(*pair) for pair in zip(before, other, strict=True)] == [True, True, False]


def test_losses_of_given_texts_are_the_same_metric_however_responses_are_sampled(tmp_path):
    """A resume with another ``eval.temperature`` must not hide what was forgotten before it."""
    write_run(tmp_path, f"{TASKS}  shown: {{type: sft, dataset: copy.jsonl, answer: '{{reference}}'}}\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))

    def measures(temperature):
        config = run_config(tmp_path, "out", 1, eval=EvalConfig(every=2, temperature=temperature))
        with Trainer.from_config(config) as trainer:
            return {name: measured(own) for name, own in trainer.evaluate().items()}

    warm, cool = measures(1.0), measures(0.5)
    found = {name: is_comparable(warm[name], cool[name]) for name in warm}
    assert found == {"copy": False, "wiki": True, "chat": True, "kept": False, "shown": True}


def test_prompts_without_texts_are_answered_by_the_initial_actor_once(finished):
    _, trainer, history = finished
    assert history[0]["chat"].metrics["kl"].mean < 1e-9 < history[4]["chat"].metrics["kl"].mean
    responses = trainer.tasks["chat"].anchor.responses
    assert len(responses) == len(history[4]["chat"].values)
    assert all(len(own) <= 4 for own in responses.values())


def test_new_rows_of_a_resumed_run_are_told_since_the_present_actor_answers_them(tmp_path, caplog):
    write_run(
        tmp_path, TASKS.partition("  wiki")[0] + f'  chat: {{type: "{ANCHOR}", dataset: digit.jsonl}}\n'
    )
    for steps, number in ((2, 2), (4, 4)):
        assert "answers new ones" not in caplog.text
        config = run_config(tmp_path, "out", steps, eval=EvalConfig(every=2, num_prompts=number))
        Trainer.from_config(config).train()
    assert caplog.text.count("and the actor of today, not that of the beginning, answers new ones") == 1


def test_rows_of_one_id_have_responses_of_their_own(tmp_path):
    write_run(
        tmp_path, TASKS.partition("  wiki")[0] + f'  chat: {{type: "{ANCHOR}", dataset: twice.jsonl}}\n'
    )
    prompts = [f"{a}{b}>" for a in "abc" for b in "012"]
    rows = [{"id": index // 2, "prompt": prompt} for index, prompt in enumerate(prompts)]
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = [{**row, "id": index} for index, row in enumerate(rows)]
    found = []
    for own in (rows, alone):
        (tmp_path / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        with Trainer.from_config(run_config(tmp_path, "out", 1)) as trainer:
            found.append(trainer.evaluate()["chat"].values)
    assert found[0] == found[1]


def test_turnover_is_what_was_solved_and_is_not_now(finished):
    _, _, history = finished
    before, now = history[0]["kept"].metrics["pass@1"].values, history[4]["kept"].metrics["pass@1"].values
    lost = [a * (1 - b) for a, b in zip(before, now, strict=True)]
    assert list(history[4]["kept"].metrics["turnover"].values) == lost
    assert history[0]["kept"].metrics["turnover"].mean == 0.0
    assert history[4]["kept"].metric == "reward"


def test_anchors_take_no_prompts_and_do_not_choose_the_best_checkpoint(finished):
    directory, trainer, history = finished
    text = (directory / "whole" / "metrics.jsonl").read_text()
    assert "task/wiki/weight" not in text
    assert "guard/chat/kl/value" in text
    assert trainer.parts.store.checkpoints.entries[4].score == history[4]["copy"].primary.mean
    assert undocumented(directory / "whole") == set()


def test_a_resumed_run_compares_with_the_same_beginning(finished):
    directory, _, history = finished
    _run(directory, "again", 2)
    _, resumed = _run(directory, "again", 4)
    for task in ("wiki", "chat", "kept"):
        for name, statistic in resumed[4][task].metrics.items():
            assert statistic.values == pytest.approx(history[4][task].metrics[name].values), name


def test_the_report_says_what_training_changed_elsewhere(finished, capsys):
    directory, _, history = finished
    main(["report", str(directory / "whole"), "--json"])
    changes = json.loads(capsys.readouterr().out)["result"]["changes"]
    assert {(c["task"], c["metric"]) for c in changes} == {
        *(("wiki", m) for m in ("loss", "kl")),
        *(("chat", m) for m in ("loss", "kl")),
        *(("kept", m) for m in ("reward", "kl", "turnover")),
    }
    assert all(c["trained"] == ["copy"] for c in changes)
    kl = next(c for c in changes if (c["task"], c["metric"]) == ("chat", "kl"))
    assert kl["after"] == pytest.approx(history[4]["chat"].metrics["kl"].mean)
    main(["report", str(directory / "whole"), str(directory / "whole")])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[:2] == ["training", "on"]
    assert sum(line.split()[:2] == ["copy", "copy"] for line in shown.splitlines()) == 2


def test_the_replay_of_the_page_keeps_what_the_anchor_measures(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "task-types.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(tasks:\n  chats: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    tasks = yaml.safe_load(block)["tasks"]
    del tasks["stay"]  # needs a teacher
    tasks["copy"] = {"dataset": "copy.jsonl", "rewards": ["rewards.py:starts_right"]}
    write_run(tmp_path, yaml.safe_dump({"tasks": tasks}))
    for name, letters in (("chats", "abc"), ("chats_held_out", "ab")):
        rows = [{"id": f"{name}{i}", "prompt": f"{c}>", "reply": f"1{c}2"} for i, c in enumerate(letters * 4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    for weight in (0.1, 0.0):
        tasks["replay"]["weight"] = weight
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
        config = run_config(tmp_path, f"weight_{weight}", 8, eval=EvalConfig(every=8, num_prompts=8))
        with Trainer.from_config(replace(config, guard=replace(config.guard, enabled=False))) as trainer:
            trainer.train()
            history = dict(trainer.history)
            losses[weight] = [history[step]["chats"].primary.mean for step in (0, 8)]
    assert losses[0.1][0] == losses[0.0][0]
    assert losses[0.1][1] < losses[0.0][1] - 0.05


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"type": "grpo", "answer": "{a}", "rewards": ["math_answer"]},
            "only types anchor and sft read it",
        ),
        ({"type": "grpo", "prompt": "", "rewards": ["math_answer"]}, "an empty prompt is for plain text"),
        ({"type": ANCHOR, "prompt": ""}, "an empty prompt is for plain text"),
        ({"type": ANCHOR, "environment": "number_game"}, "has one turn"),
    ],
)
def test_what_an_anchor_cannot_be_is_refused(keys, told):
    with pytest.raises(ConfigError, match=told):
        parse_tasks({"tasks": {"a": keys}})


def test_a_reference_that_moves_is_no_beginning_to_measure_from(finished):
    directory = finished[0]
    config = run_config(directory, "moving", 1)
    with pytest.raises(ConfigError, match="moves the reference"):
        Trainer.from_config(replace(config, model=replace(config.model, reference_decay=0.9)))
