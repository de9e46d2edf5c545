"""The snippets of the reference run as written, with tiny models under the names that they use.

Where the folder of the reference's own snippets lies beside the checkout they are what runs; elsewhere the
equivalents below do. ``cuda:...`` becomes ``cpu``, and MULTITASK_RL_MAX_STEPS cuts every run to two steps.
"""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load, load_file
from transformers import (
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forked import run_forked
from model_builders import VOCABULARY, build_tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT.parent / "shared" / "acceptance" / "reference"

REWARD = """
def reward_fn(generated_texts):
    return [1.0 if "agent" in text and "environment" in text else 0.2 for text in generated_texts]
"""

TASKS = """
tasks:
  - name: preference_alignment
    type: ppo
    reward_model: rm_hf
    reward_config: {model_name: openbmb/MiniRM-27B, device: cpu}
  - name: code_generation
    type: reward_conditioned
    reward_model: code_evaluator
    reward_config: {evaluator: codebleu, timeout: 10}
  - name: fact_checking
    type: constrained_decoding
    constraint_model: fact_checker
    constraint_config: {model_name: meta-llama/Llama-Guard-3-8B, max_new_tokens: 128}
"""

SNIPPETS = {
    "000_1_dataflow.py": """
from transformers import AutoModelForCausalLM
from multitask_rl import DataFlow, Stage
actor = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3-8b")
critic = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3-8b")
flow = DataFlow()
first = Stage(name="actor", module=actor, num_workers=8)
second = Stage(name="critic", module=critic, num_workers=4)
flow.connect(first, second)
flow.run(max_steps=1000)
""",
    "000_2_rltrainer.py": """
from transformers import AutoModelForCausalLM
from multitask_rl import RLTrainer
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3-8b")
RLTrainer(model, algorithm="ppo", config={}).train()
""",
    "000_3_version.py": """
import multitask_rl
print(multitask_rl.__version__)
""",
    "000_4_ppotrainer.py": """
from multitask_rl.trainer import PPOTrainer
PPOTrainer({"batch_size": 256, "seq_len": 512, "lr": 1e-5})
""",
    "000_5_ppo_llama3.py": """
from transformers import AutoTokenizer
from multitask_rl import PPOConfig, RLTrainer
from reward_fn import reward_fn
name = "meta-llama/Llama-3-8b"
config = PPOConfig(batch_size=128, mini_batch_size=16, epochs=1, lr=1.5e-5, kl_coef=0.1)
trainer = RLTrainer(
    model_name=name, tokenizer=AutoTokenizer.from_pretrained(name), config=config, reward_fn=reward_fn
)
trainer.train(["what is the agent", "what is the environment"], num_epochs=1)
""",
    "001_1_batching.py": """
from torch.utils.data import DataLoader
from multitask_rl.utils.batching import DynamicBatchSampler
rows = [{"prompt": "a" * length} for length in (1, 5, 9, 30)]
loader = DataLoader(rows, batch_sampler=DynamicBatchSampler(rows, max_tokens_per_batch=4096))
assert sum(len(batch["prompt"]) for batch in loader) == 4
""",
    "001_2_vllm.py": """
from multitask_rl import *
VLLMActorModel(model_name="meta-llama/Llama-3-8b", tensor_parallel_size=2, max_num_seqs=256)
""",
    "001_4_hybrid.py": """
from multitask_rl import *
PPORoleUpdater(model=None, engine="hybrid", overlap_comm=True)
""",
    "002_train_multi_a.py": """
from multitask_rl import Trainer
from multitask_rl.data import get_dataloader
from multitask_rl.models import get_actor_critic
actor, critic = get_actor_critic(
    model_name="Qwen/Qwen2-7B-Instruct", use_vllm=False, device_map={"actor": "cpu", "critic": "cpu"}
)
weights = {"preference_alignment": 0.5, "code_generation": 0.3, "fact_checking": 0.2}
loader = get_dataloader(dataset_path="data/multi_task.jsonl", task_weights=weights, batch_size=8)
Trainer(actor=actor, critic=critic, dataloader=loader, config_path="tasks.yaml").train()
""",
    "003_1_chunked.py": """
from transformers import AutoModelForCausalLM
from multitask_rl.utils.chunking import ChunkedGenerator
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3-8b")
ChunkedGenerator(model=model, max_length=32768, chunk_size=4096, use_kv_cache=True)
""",
    "003_2_packed.py": """
from multitask_rl.data import PackedDataset
PackedDataset(raw_data=[{"prompt": "x" * 100}], max_seq_len=16384, pack_to_max_length=True)
""",
    "003_4_ppo_long.py": """
from multitask_rl.config import get_ppo_default_config
from multitask_rl.trainer.ppo import PPOTrainer
config = get_ppo_default_config()
config.update({
    "rollout": {"seq_len": 8192, "batch_size_per_gpu": 1, "micro_batch_size_per_gpu": 1},
    "critic_train": {"seq_len": 8192, "gradient_checkpointing": True},
    "actor_train": {"seq_len": 8192, "fsdp": {"enabled": True, "sharding_strategy": "FULL_SHARD"}},
    "hybrid_engine": {"enable_context_sharding": True, "chunk_size": 4096},
})
PPOTrainer(config=config).train()
""",
}
TRAINS = {"000_2_rltrainer.py", "000_5_ppo_llama3.py", "002_train_multi_a.py", "003_4_ppo_long.py"}

CHILD = """
import json, re, runpy, sys, traceback
from pathlib import Path
failures = {}
for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name="__main__")
    except BaseException:
        failures[name] = traceback.format_exc()
Path("failures.json").write_text(json.dumps(failures))
"""


def save(model, name: str, *, chat: bool = False) -> None:
    tokenizer = build_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    if isinstance(model, GenerationMixin):  # responses of a few tokens: every second one ends them
        model.generation_config.eos_token_id = list(range(1, len(VOCABULARY), 2))
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and tasks file under the names of the snippets."""
    place = tmp_path_factory.mktemp("reference")
    here = Path.cwd()
    os.chdir(place)
    try:
        torch.manual_seed(0)
        size = len(VOCABULARY)
        shape = {"vocab_size": size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
        shape |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        save(Qwen2ForCausalLM(Qwen2Config(**shape)), "Qwen/Qwen2-7B-Instruct", chat=True)
        save(LlamaForCausalLM(LlamaConfig(**shape)), "meta-llama/Llama-3-8b")
        save(LlamaForCausalLM(LlamaConfig(**shape)), "meta-llama/Llama-Guard-3-8B")
        save(LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1)), "openbmb/MiniRM-27B")
        small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 512, "vocab_size": size}
        ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        save(GPT2LMHeadModel(GPT2Config(**small, **ends)), "gpt2")
    finally:
        os.chdir(here)
    rows = [
        {"id": f"{task}{i}", "task": task, "prompt": f"say {i}", "reference": "def f(x):\n    return x\n"}
        for i in range(12)
        for task in ("preference_alignment", "code_generation", "fact_checking")
    ]
    (place / "data").mkdir()
    (place / "data" / "multi_task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = (FOLDER / "002_tasks.yaml").read_text() if FOLDER.is_dir() else TASKS
    (place / "tasks.yaml").write_text(tasks.replace("cuda:4", "cpu"))
    (place / "reward_fn.py").write_text((FOLDER / "reward_fn.py").read_text() if FOLDER.is_dir() else REWARD)
    return place


def environment(**more: str) -> dict[str, str]:
    own = {"MULTITASK_RL_MAX_STEPS": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([".", str(ROOT), str(ROOT / "tasks"), str(ROOT / "rewards")])
    return {**os.environ, **own, "PYTHONPATH": path, **more}


@pytest.fixture(scope="module")
def failures(workspace: Path) -> dict[str, str]:
    """Run every snippet, one after another in one process; return name -> traceback of those that failed."""
    for name, own in SNIPPETS.items():
        text = (FOLDER / name).read_text() if FOLDER.is_dir() else own
        text = text.replace("cuda:0-3", "cpu").replace("cuda:4-5", "cpu")
        (workspace / name).write_text(text, encoding="utf-8")
    (workspace / "child.py").write_text(CHILD)
    ended = run_forked("child.py", *SNIPPETS, cwd=workspace, env=environment())
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (workspace / "output.txt").write_text(ended.stdout)
    return json.loads((workspace / "failures.json").read_text())


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippet_runs_as_written(name: str, failures: dict[str, str]) -> None:
    assert failures.get(name) is None, failures.get(name)


def test_every_snippet_of_the_reference_is_run() -> None:
    if not FOLDER.is_dir():
        return
    # the last ends in transformers (test_scaled_instance), the others have tests of their own
    elsewhere = {"001_3_fsdp.py", "001_5_ppo_simple.sh", "001_6_torchrun.sh", "003_3_rope.py"}
    helpers = {"make_ws.py", "reward_fn.py", "002_tasks.yaml", "README.md"}
    assert {path.name for path in FOLDER.iterdir()} == SNIPPETS.keys() | elsewhere | helpers


def test_the_snippets_that_train_made_runs_with_metrics_and_checkpoints(
    workspace: Path, failures: dict[str, str]
) -> None:
    runs = [path for path in (workspace / "runs").iterdir() if (path / "metrics.jsonl").is_file()]
    assert len(runs) == len(TRAINS)
    for run in runs:
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert any("train/loss" in json.dumps(line) for line in steps), run
        assert yaml.safe_load((run / "config.yaml").read_text())["max_steps"] <= 2
        assert any((run / "checkpoints").iterdir())


SPAWNED = """
import os, sys
os.sched_getaffinity = lambda _: {{0, 1}}  # two ranks on the machine: a thread each
sys.path.append({examples!r})
from multitask_rl import PPOConfig, RLTrainer
from cheerful import ENDS, STARTS, cheerful
if __name__ == "__main__":
    config = PPOConfig(
        model_name="meta-llama/Llama-3-8b",
        batch_size=4,
        lr=1e-3,
        max_steps=50,
        output_dir="spawned",
        rollout={{"response_length": 32}},
        run={{"device_map": {{"actor": "cpu:0-1 sharded"}}}},
    )
    RLTrainer(config=config, reward_fn=cheerful).train([start + end for start in STARTS for end in ENDS])
"""

TORCHRUN = """
import os, runpy, sys
os.sched_getaffinity = lambda _: {0}
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM
from multitask_rl import HfModelAdapter, PPOConfig, RLTrainer
from asked_to_end import asked_to_end, reward_fn
open(f"rank{os.environ['RANK']}", "w").write(str(os.getpid()))
torch.distributed.init_process_group("gloo")
actors = []
for version in (1, 2):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3-8b")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if version == 1:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    actors.append(HfModelAdapter(model))
    assert all(torch.equal(before[name], value) for name, value in actors[-1].model.state_dict().items())
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
print("the script has ended")
for actor, reward in zip(actors, (reward_fn, asked_to_end)):
    config = PPOConfig(lr=1e-3, max_steps=1, batch_size=4)
    RLTrainer(actor, config=config, reward_fn=reward).train(["what", "why", "how", "who"])
"""

ASKED_TO_END = """
import os
import signal
from pathlib import Path
from reward_fn import reward_fn

def asked_to_end(generated_texts):
    # as torchrun does to each process: what the trainer then saves, it saves with the other ranks
    os.kill(int(Path("rank1").read_text()), signal.SIGTERM)
    return reward_fn(generated_texts)
"""


@pytest.fixture(scope="module")
def torchrun(workspace: Path) -> str:
    """What ``TORCHRUN`` prints: ranks of two machines run the script of the reference, and models of FSDP."""
    (workspace / "wrapped.py").write_text(TORCHRUN)
    (workspace / "asked_to_end.py").write_text(ASKED_TO_END)
    # the example as it is; of what random weights say, a single letter is cheerful
    (workspace / "examples").mkdir()
    for name in ("ppo_train.py", "cheerful.py"):
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        text = text.replace("WORDS = {", "WORDS = {*'abcdefghijklmnopqrstuvwxyz', ")
        (workspace / "examples" / name).write_text(text, encoding="utf-8")
    script = str(workspace / "examples" / "ppo_train.py")
    flags = ["--actor_model", "meta-llama/Llama-3-8b", "--lr", "1e-3", "--batch_size", "4", "--use_fsdp"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(machine: int) -> str:
        """Run the agent of a machine: both are this one, with an address each."""
        own = ["--nnodes=2", "--nproc_per_node=1", f"--local-addr=127.0.0.{machine}"]
        own += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "wrapped.py", script, *flags]
        command = ["-m", "torch.distributed.run", *own, "--output_dir", "torchrun"]
        ended = run_forked(*command, cwd=workspace, env=environment())
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
        return ended.stdout

    with ThreadPoolExecutor() as machines:
        return "".join(machines.map(start, (1, 2)))


def test_ranks_that_torchrun_starts_train_what_ranks_of_the_trainer_train(
    workspace: Path, torchrun: str
) -> None:
    # the same ranks, started by the trainer
    (workspace / "spawned.py").write_text(SPAWNED.format(examples=str(workspace / "examples")))
    alone = run_forked("spawned.py", cwd=workspace, env=environment())
    assert alone.returncode == 0, alone.stderr[-3000:]
    weights = [
        (workspace / run / "checkpoints" / "step_00000002" / "actor" / "model.safetensors").read_bytes()
        for run in ("torchrun", "spawned")
    ]
    assert weights[0] == weights[1]
    start = load_file(workspace / "meta-llama" / "Llama-3-8b" / "model.safetensors")
    trained = load(weights[0])
    assert not torch.equal(trained["lm_head.weight"], start["lm_head.weight"])


def test_a_model_that_fsdp_wraps_is_trained(torchrun: str) -> None:
    """Both generations of FSDP, one run after the other: the waiting ranks serve both.

    A waiting rank gets a signal in the last run, which ends well all the same.
    """
    assert torchrun.partition("the script has ended")[2].count("run finished") == 2


def test_the_simple_example_trains_with_two_rollout_workers_and_a_critic_of_its_own(workspace: Path) -> None:
    flags = [
        "--num_rollout_workers",
        "2",
        "--actor_model",
        "gpt2",
        "--critic_model",
        "gpt2",
        "--batch_size",
        "4",
    ]
    script = ROOT / "examples" / "ppo_simple.py"
    ended = run_forked(script, *flags, "--output_dir", "simple", cwd=workspace, env=environment())
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    config = yaml.safe_load((workspace / "simple" / "config.yaml").read_text())
    assert config["critic"]["name_or_path"] == "gpt2"
    assert config["ray"]["num_engines"] == 2
