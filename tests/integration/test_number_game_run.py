"""A bundled game in a run: its rows, its world in a worker, its reward."""

import json

from multitask_rl.config.run import BatchConfig, EvalConfig
from multitask_rl.tracking.jsonl import rollout_from_dict
from run_builders import run_config, train, write_run

PLACE = "multitask_rl_tasks.environments.number_game"
GAME = f"""
tasks:
  game:
    type: grpo
    dataset: plugin:{PLACE}:NumberGameTask
    dataset_config: {{level: 2, num_rows: 100}}
    prompt: "{{prompt}}"
    environment: {PLACE}:NumberGame
    environment_config: {{higher: "+", lower: "-", unclear: "?"}}
"""


def test_a_run_plays_the_number_game(tmp_path):
    write_run(tmp_path, GAME)
    batch = BatchConfig(prompts_per_step=8, group_size=4)
    train(run_config(tmp_path, "out", 2, batch=batch, eval=EvalConfig(every=2, num_prompts=10)))
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        rollout = rollout_from_dict(row)
        assert len(rollout.turns) in (1, 2)
        assert row["reward"] in (0.0, 1.0)
        assert all(turn.messages[0]["content"] in "+-?" for turn in rollout.turns[1:])
    written = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    metrics = {name: value for line in written for name, value in json.loads(line).items()}
    assert 0.0 <= metrics["task/game/environment/solved"] <= 1.0
    assert metrics["task/game/turns"] > 1.0
