"""A run on streamed rows: resumed it equals the uninterrupted one; what needs all rows is refused."""

from dataclasses import replace

import datasets
import pytest

from model_builders import build_model, build_tokenizer
from multitask_rl import PPOConfig, RLTrainer
from multitask_rl.config.task import TaskSpec
from multitask_rl.data import StreamedPrompts, get_dataloader
from multitask_rl.data.readers import BLOCK
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.run.plan import load_task_rows
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, write_run

TASKS = """
tasks:
  letters:
    dataset: json
    dataset_config:
      streaming: true
      data_files: {{train: [{folder}/copy.jsonl, {folder}/digit.jsonl], validation: {folder}/copy.jsonl}}
    rewards: [rewards.py:starts_right]
"""


def test_a_run_on_a_stream_resumed_equals_the_uninterrupted_one(tmp_path):
    write_run(tmp_path, TASKS.format(folder=tmp_path), num_rows=30)
    train(run_config(tmp_path, "whole", 4))
    for steps in (2, 4):
        train(run_config(tmp_path, "parts", steps))
    assert lines(tmp_path / "parts", "rollouts.jsonl") == lines(tmp_path / "whole", "rollouts.jsonl")


def test_a_later_row_without_a_prompt_is_left_out_and_a_first_one_is_refused(caplog):
    def specs(number):
        rows = datasets.IterableDataset.from_generator(
            lambda: ({"prompt": f"{i}>" if i % 1100 < number else None} for i in range(2200))
        )
        return {"t": TaskSpec(name="t")}, get_dataloader(rows.map(lambda row: {"task": "t"}))

    train_rows, _ = load_task_rows(*specs(BLOCK))["t"]
    prompts = StreamedPrompts(train_rows, task="t", seed=0)
    assert all(row["prompt"] for _, row in prompts.next(2 * BLOCK))
    (warning,) = caplog.messages
    assert warning.startswith(
        "a streamed row is left out, as will be others of its kind: tasks.t.prompt: row"
    )
    assert "lacks prompt" in warning
    with pytest.raises(DataError, match="lacks prompt"):
        load_task_rows(*specs(1000))


def test_what_needs_all_rows_is_refused(tmp_path):
    write_run(tmp_path, TASKS.format(folder=tmp_path))
    config = run_config(tmp_path, "out", 1)
    pools = replace(config, tasks={"letters": {"curriculum": {"by": "pass_rate"}}})
    with pytest.raises(ConfigError, match="streamed rows are not known beforehand; leave out curriculum"):
        Trainer.from_config(pools)
    prompts = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"{i}>"} for i in range(9)))
    with pytest.raises(ConfigError, match=r"length of an epoch, is not known; give max_steps"):
        RLTrainer(
            build_model(),
            build_tokenizer(),
            config=PPOConfig(output_dir=str(tmp_path / "epochs")),
            reward_fn=lambda response: 0.0,
        ).open(prompts)
