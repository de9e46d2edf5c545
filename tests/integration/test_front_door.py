"""The script and the tasks file of the reference, with only models, data and devices changed."""

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from forked import run_forked
from model_builders import VOCABULARY, build_tokenizer
from run_builders import write_run

REFERENCE = Path(__file__).parents[2] / "configs" / "reference_tasks.yaml"

SCRIPT = """
from multitask_rl import DynamicTaskWeightScheduler, SafetyGuard, Trainer, get_actor_critic, get_dataloader

actor, critic = get_actor_critic(
    model_name="actor", use_vllm=False, device_map={"actor": "cpu", "critic": "cpu"}
)
loader = get_dataloader(
    dataset_path="data/multi_task.jsonl",
    task_weights={"preference_alignment": 0.5, "code_generation": 0.3},
    batch_size=8,
)
trainer = Trainer(actor=actor, critic=critic, dataloader=loader, config_path="tasks.yaml")
trainer.set_task_scheduler(
    DynamicTaskWeightScheduler(
        initial_weights={"preference_alignment": 0.5, "code_generation": 0.3},
        metric_key="reward_score",
        patience=500,
        min_weight=0.1,
    )
)
trainer.add_guard(
    SafetyGuard(
        monitor_metrics=["preference_alignment", "fact_checking"], threshold_delta=-0.15, rollback_steps=100
    )
)
trainer.enable_3d_hybrid_engine()
trainer.train()
"""


def save(architecture, directory: Path, **changes: object) -> None:
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    architecture(LlamaConfig(**(settings | changes))).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


@pytest.fixture
def workspace(tmp_path):
    write_run(tmp_path)
    save(LlamaForCausalLM, tmp_path / "actor")
    save(LlamaForSequenceClassification, tmp_path / "reward_model", num_labels=1)
    save(
        LlamaForSequenceClassification,
        tmp_path / "checker",
        num_labels=3,
        id2label={0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"},
        label2id={"ENTAILMENT": 0, "NEUTRAL": 1, "CONTRADICTION": 2},
    )
    tasks = yaml.safe_load(REFERENCE.read_text())
    (items,) = tasks.values()
    by_name = items if isinstance(items, dict) else {item["name"]: item for item in items}
    by_name["preference_alignment"]["reward_config"] = {"model_name": "reward_model", "device": "cpu"}
    by_name["fact_checking"]["constraint_config"]["model_name"] = "checker"
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    rng = random.Random(0)
    rows = []
    for i in range(90):
        word = "".join(rng.choice("abc") for _ in range(3))
        rows.append({"id": f"p{i}", "task": "preference_alignment", "prompt": f"{word}>"})
        rows.append(
            {
                "id": f"c{i}",
                "task": "code_generation",
                "prompt": "add one>",
                "reference": f"def f(x):\n    return x + {i}\n",
                "tests": [f"assert f(1) == {1 + i}"],
                "entry_point": "f",
            }
        )
        rows.append(
            {
                "id": f"f{i}",
                "task": "fact_checking",
                "prompt": f"is {word} a word>",
                "evidence": f"{word} is a word.",
                "reference": "yes",
            }
        )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "multi_task.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


def test_the_reference_script_trains_the_reference_tasks(workspace):
    settings = (
        "from multitask_rl.config.run import EvalConfig, RolloutConfig, RunConfig\n"
        "config = RunConfig(max_steps=3, eval=EvalConfig(every=0, num_prompts=4),\n"
        "                   rollout=RolloutConfig(max_new_tokens=8))\n"
    )
    quick = settings + SCRIPT.replace('config_path="tasks.yaml")', 'config_path="tasks.yaml", config=config)')
    (workspace / "train.py").write_text(quick)
    done = run_forked("train.py", cwd=workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (workspace / "runs/default/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/learning_rate" in row]
    assert len(steps) == 3
    rewarded = {
        k.split("/")[1] for row in steps for k in row if k.startswith("task/") and k.endswith("/reward_mean")
    }
    assert rewarded == {"preference_alignment", "code_generation", "fact_checking"}
    assert all("task/fact_checking/rejection_rate" in row for row in steps)
    events = (workspace / "runs/default/events.jsonl").read_text()
    assert "no weight given for fact_checking" in events
