"""A run of Python objects that a script, started again, goes on with."""

import datasets

from model_builders import build_model, build_tokenizer
from multitask_rl.config.run import BatchConfig, CheckpointConfig
from multitask_rl.records import Verdict
from multitask_rl.trainer import Trainer
from run_builders import run_config


def objects(most, rows, held_out):
    """Return a mapping of tasks, made anew as a script does."""

    class Long:
        def judge(self, rollouts):
            return [Verdict(cost=float(len(r.response) > most), violated=False) for r in rollouts]

    vowels = {"a", "e"}
    return {
        "vowels": {
            "dataset": datasets.Dataset.from_list(rows),
            "eval_dataset": held_out,
            "rewards": [
                lambda response: float(response[:1] in vowels),
                lambda response: len(response) / most,
            ],
            "constraints": [{"plugin": Long(), "name": "long", "mode": "penalty"}],
        }
    }


def test_the_same_objects_go_on_without_a_word_and_changed_ones_are_told(tmp_path, caplog):
    config = run_config(
        tmp_path, "run", 1, batch=BatchConfig(prompts_per_step=2, group_size=2), checkpoint=CheckpointConfig()
    )
    config.tasks_file = ""
    rows = [{"prompt": f"{i}>"} for i in range(300)]

    def step(tasks):
        caplog.clear()
        config.max_steps = config.max_steps + 1
        with Trainer(build_model(), tokenizer=build_tokenizer(), config_path=tasks, config=config) as trainer:
            trainer.train()
            told = [event.reason for event in trainer.events if event.kind == "changed"]
        return told, [r.getMessage() for r in caplog.records if "changed since" in r.getMessage()]

    assert step(objects(3, rows, rows[:2])) == ([], [])
    assert step(objects(3, rows, rows[:2])) == ([], [])
    others = [*rows[:7], {"prompt": "other>"}, *rows[8:]]  # one of 300
    told, warnings = step(objects(4, others, rows[:3]))
    assert [w.partition(" changed")[0] for w in warnings] == [
        "data set of task 'vowels'",
        "the held-out rows of task 'vowels'",
    ]
    (reason,) = told
    assert "tasks.vowels.rewards" in reason
    assert "tasks.vowels.constraints" in reason


def test_a_class_of_a_notebook_is_the_same_after_its_run_has_loaded_it(tmp_path):
    """Loading gives the class functions of its own: their defaults are equal, and not the same objects."""

    class Holds:
        def __init__(self, letter="a"):
            self.letter = letter

        def score(self, rollouts):
            return [float(self.letter in rollout.response) for rollout in rollouts]

    tasks = {"t": {"dataset": [{"prompt": f"{i}>"} for i in range(20)], "rewards": [Holds("a")]}}
    changed = []
    for steps in (1, 2, 3):
        config = run_config(tmp_path, "run", steps, batch=BatchConfig(prompts_per_step=2, group_size=2))
        config.tasks_file = ""
        with Trainer(build_model(), tokenizer=build_tokenizer(), config_path=tasks, config=config) as trainer:
            trainer.train()
            changed += [event.reason for event in trainer.events if event.kind == "changed"]
    assert changed == []
    assert len(list((tmp_path / "run" / "plugins").glob("*.py"))) == 1
