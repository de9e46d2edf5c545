"""Honest and hostile responses mixed through the whole scoring path: a JSON line per check, and a summary.

    python benchmarks/hostile.py --n 64 --seed 1 [--json FILE]

For each bundled check ``n`` honest responses are scored alone, then the same ones among ``n`` hostile ones;
those with a model get a tiny random one. Reported: honest verdicts that changed, results without a type,
seconds of the mixture, by how many seconds one hostile response delays its step (the step less the same
without it: that shall be less than the time limit of its check), growth of this process's memory, and
processes, threads, descriptors and files left (in a temporary and working directory of its own). Exit code
1 if a verdict changed, a process or file is left, memory grew by 200 MiB or a delay passed its limit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hostile_texts import hostile_texts

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.records import Failure, NotApplicable, Rollout, Score, Turn, Verdict
from multitask_rl.scoring.adapt import find_plugin, resolve_reward
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout

LIMIT_MIB = 200
ROUNDING = 1e-5
COMMAND = "python benchmarks/hostile.py --n {0.n} --seed {0.seed}"
ROOT = Path(__file__).parents[1]
PROGRAMS = (
    "import time\ndef f(x):\n    time.sleep(100)\n",
    "def f(x):\n    while True: pass\n",
    "def f(x):\n    return 'x' * 10**10\n",
    "import os\nos._exit(0)\n",
    "def f(x):\n    print('x' * 10**8)\n",
    "x = [0]\nfor _ in range(40): x = [x, x]\ndef f(n): return x\n",
    "".join(f"{' ' * d}try: x\n{' ' * d}finally:\n" for d in range(18)) + " " * 18 + "x\n",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A plugin with rows, honest responses and hostile ones of its own."""

    plugin: str
    row: Mapping[str, Any]
    honest: Callable[[int], str]
    own: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    is_constraint: bool = False
    earns: Callable[[str], Any] | None = None
    """Set: a response is an episode of two such answers, and this is what its world gave it."""

    def rollout(self, text: str, index: int) -> Rollout:
        """Return a response, or an episode."""
        rollout = make_rollout(text, task="t", row={**self.row, "i": index}, draw=index)
        if self.earns is None:
            return rollout
        turns = [Turn(num_tokens=0, response=text), Turn(num_tokens=len(text), response=text)]
        return replace(rollout, turns=turns, earned=self.earns(text))


def checks() -> list[Check]:
    """Return every bundled check that needs no model."""
    instructions = [
        {
            "instruction_id": "length_constraints:number_sentences",
            "kwargs": {"num_sentences": 2, "relation": "at least"},
        },
        {"instruction_id": "detectable_format:title", "kwargs": {}},
        {"instruction_id": "detectable_format:number_bullet_lists", "kwargs": {"num_bullets": 1}},
    ]
    number = lambda i: f"The answer is {i % 3}."  # noqa: E731
    word = lambda i: ("Paris", "Rome", "It is Paris.")[i % 3]  # noqa: E731
    code = lambda i: f"```python\ndef f(x):\n    return x + {i % 3}\n```"  # noqa: E731
    fenced = tuple(f"```python\n{program}```" for program in PROGRAMS)
    return [
        Check("math_answer", {"reference": "1"}, number, ("10**10**10", "\\boxed{9^{9^{9^{9}}}}")),
        Check("exact_match", {"reference": "Paris"}, word),
        Check("f1", {"reference": "Paris"}, word),
        Check("rouge", {"reference": "Paris is the capital " * 50}, word),
        Check("label_match", {"reference": "Paris", "labels": ["Paris", "Rome"]}, word),
        Check(
            "ifeval",
            {"tests": instructions},
            lambda i: f"<<Title {i}>> One. Two.\n- three",
            ("Word. " * 6000,),
        ),
        Check("length", {}, word),
        Check("repetition", {}, word),
        Check(
            "regex",
            {},
            lambda i: "aaa" * (1 + i % 2),
            ("a" * 40 + "b",),
            {"pattern": "(a|a)+$", "full": True},
        ),
        Check("format", {}, lambda i: f"<think>{i}</think><answer>{i}</answer>"),
        Check("json_schema", {"schema": {"type": "object"}}, lambda i: "{}" if i % 2 else "[1]"),
        Check(
            "refusal", {"reference": "refuse"}, lambda i: ("I can't help with that.", "Sure: 1. Take")[i % 2]
        ),
        Check("over_refusal", {"reference": "comply"}, lambda i: ("I can't help.", "Sure.")[i % 2]),
        Check(
            "over_refusal",
            {"reference": "comply"},
            lambda i: ("I can't.", "Sure.")[i % 2],
            is_constraint=True,
        ),
        Check(
            "environment",
            {},
            word,
            earns=lambda text: (None, len(text) / 7, {"parts": 1e300, text[:9]: -1.0})[len(text) % 3],
        ),
        Check(
            "tool_use",
            {},
            lambda i: call("search", query="aaa" * (1 + i % 2)) + call("shell" if i % 3 else "note", path=i),
            (
                call("search", query="a" * 40 + "b"),
                call("search", query={"a": [1]}) * 2000,
                "<tool_call>" * 20_000,
                "<function=search><parameter=query>" * 5000,
                '<tool_call>{"name":' * 5000,
                "<tool_call>" + "[" * 100_000,
            ),
            {
                "forbidden": ["shell"],
                "most": {"*": 100},
                "arguments": {"search": {"query": "(a|a)+$"}},
            },
            is_constraint=True,
            earns=lambda text: 1.0,
        ),
        Check(
            "code_evaluator",
            {"prompt": "Write f.", "entry_point": "f", "tests": ["assert f(1) == 2", "assert f(2) == 3"]},
            code,
            fenced,
            {"timeout": 1.0},
        ),
    ]


def call(tool: str, **arguments: Any) -> str:
    """Return a call of a tool as the actor writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def save_models(folder: Path) -> None:
    """Save tiny random models that read bytes, below ``folder``: a classifier, a reward model and a judge."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    torch.manual_seed(0)
    signs = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")

    def config(places: int, **changes: Any) -> Any:
        return Qwen2Config(
            vocab_size=len(signs),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=places,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            **changes,
        )

    labels = {0: "safe", 1: "unsafe", 2: "contradiction"}
    for name, model in (
        ("classifier", Qwen2ForSequenceClassification(config(256, num_labels=3, id2label=labels))),
        ("reward", Qwen2ForSequenceClassification(config(256, num_labels=1))),
        ("judge", Qwen2ForCausalLM(config(2048))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


class _Endpoint(BaseHTTPRequestHandler):
    """A judge behind HTTP: its score is the length of what it is shown, modulo 11."""

    def do_POST(self) -> None:
        shown = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        answer = {"choices": [{"message": {"content": f"Score: {len(shown) % 11}"}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def model_checks(folder: Path) -> Iterator[list[Check]]:
    """Yield every bundled check that asks a model: those of ``save_models``, and an endpoint that is up."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    word = lambda i: ("Paris", "Rome", "It is Paris.")[i % 3]  # noqa: E731
    row = {"prompt": "What is the capital of France?", "chosen": "Paris", "evidence": "Paris is the capital."}
    own = ("x" * 4000, "é" * 20_000, "<e" * 5000 + "os>" * 5000, "Paris \ud800")
    endpoint = {"base_url": f"http://127.0.0.1:{server.server_address[1]}/v1", "model": "judge"}

    def on(name: str) -> dict[str, Any]:
        return {"model_name": str(folder / name), "device": "cpu"}

    try:
        yield [
            Check("rm_hf", row, word, own, on("reward")),
            Check("pairwise_rm", row, word, own, on("reward")),
            Check("rm_generative", row, word, own, endpoint),
            Check("safety_classifier", row, word, own, on("classifier"), is_constraint=True),
            Check("fact_checker", row, word, own, on("classifier"), is_constraint=True),
            Check("llama_guard", row, word, own, {**on("judge"), "max_parts": 8}, is_constraint=True),
        ]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_same(one: Any, other: Any) -> bool:
    """Whether two results are the same but for rounding: a batch changes a model's last digits."""
    if isinstance(one, Score) and isinstance(other, Score):
        return abs(one.value - other.value) < ROUNDING
    if isinstance(one, Verdict) and isinstance(other, Verdict):
        return one.violated == other.violated and abs(one.cost - other.cost) < ROUNDING
    return bool(one == other)


def run(check: Check, number: int, stream: random.Random, step: int) -> dict[str, Any]:
    """Score honest responses alone and in mixtures; return what was seen.

    Args:
        check: what scores them.
        number: honest ones, and hostile ones, of the mixture.
        stream: draws the hostile ones and their places.
        step: responses of the step with one hostile one.
    """
    kind, name = ("constraint" if check.is_constraint else "reward"), "check"
    spec = TaskSpec(name="t")
    if check.is_constraint:
        spec.constraints = [ConstraintSpec(plugin=check.plugin, name=name, config=check.config or {})]
        limit_s = find_plugin("constraint", check.plugin, name).build(check.config or {}).traits.timeout_s
    else:
        spec.rewards = [RewardSpec(plugin=check.plugin, name=name, config=check.config or {})]
        limit_s = resolve_reward(spec.rewards[0], check.plugin).traits.timeout_s

    def rollouts(texts: list[str]) -> list[Rollout]:
        return [check.rollout(text, i) for i, text in enumerate(texts)]

    honest = [check.honest(i) for i in range(number)]
    pool_of_hostile = [text for _, text in hostile_texts(10_000, stream.randrange(1 << 30))]
    stream.shuffle(pool_of_hostile)
    hostile = [*itertools.islice(itertools.cycle([*check.own, *pool_of_hostile]), number)]
    with RewardPool({"t": spec}, ScoringConfig(max_failure_rate=1.0), seed=0, devices={}) as pool:

        def score(texts: list[str]) -> tuple[list[Any], float]:
            began = time.monotonic()
            if check.is_constraint:
                results: list[Any] = [v[name] for v in pool.judge(rollouts(texts))]
            else:
                results = [s.breakdown[name] for s in pool.score(rollouts(texts))]
            return results, time.monotonic() - began

        memory = resident_mib()
        expected, alone_s = score(honest)
        one, delay_s, worst = [], 0.0, ""
        for i, text in enumerate(check.own or ("(" * 10_000,)):
            # Other texts each time: nothing comes from the cache.
            without = [f"{check.honest(k)}{' ' * (2 * i + 1)}" for k in range(step - 1)]
            _, without_s = score(without)
            results, with_s = score([*(f"{text} " for text in without), text])
            one += results
            if with_s - without_s > delay_s:
                delay_s, worst = with_s - without_s, text
        places = [(0, i) for i in range(number)] + [(1, i) for i in range(len(hostile))]
        stream.shuffle(places)
        mixed, mixed_s = score([(honest, hostile)[side][i] for side, i in places])
        grown = resident_mib() - memory
    changed = sum(not is_same(mixed[at], expected[i]) for at, (side, i) in enumerate(places) if side == 0)
    given = [mixed[at] for at, (side, _) in enumerate(places) if side == 1]
    return {
        "check": f"{kind} {check.plugin}",
        "honest_changed": changed,
        "failures": sum(isinstance(r, Failure) for r in [*mixed, *one]),
        "untyped": sum(not isinstance(r, (Score, NotApplicable, Verdict, Failure)) for r in mixed),
        "overruns": sum(isinstance(r, Score) and "overrun" in r.components for r in given),
        "full_scores_of_hostile": sum(isinstance(r, Score) and r.value >= 1.0 for r in given),
        "grown_mib": round(grown, 1),
        "alone_s": round(alone_s, 2),
        "one_hostile_delays_s": round(delay_s, 2),
        "limit_s": limit_s,
        "worst": worst[:32],
        "mixed_s": round(mixed_s, 2),
    }


def resident_mib() -> float:
    """Return this process's resident memory, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def left(folder: Path) -> dict[str, int]:
    """Return what this process holds: children, threads, descriptors, files below ``folder``."""
    children = sum(
        len((task / "children").read_text().split()) for task in Path(f"/proc/{os.getpid()}/task").iterdir()
    )
    return {
        "children": children,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sum(path.is_file() for path in folder.rglob("*")),
    }


def main() -> int:
    """Run all checks; 1 if something must not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=64, help="honest responses, and hostile ones, per check")
    parser.add_argument("--step", type=int, default=256, help="responses of a step with one hostile one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="name of one plugin")
    parser.add_argument("--json", type=Path, dest="json_file", help="write the result there")
    arguments = parser.parse_args()
    json_file = arguments.json_file and arguments.json_file.resolve()
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = os.environ["TMPDIR"] = scratch
        os.chdir(scratch)
        found, summary = measure(arguments, Path(models), Path(scratch))
        os.chdir(ROOT)
    if json_file is not None:
        text = json.dumps(
            {"command": COMMAND.format(arguments), "checks": found, "summary": summary}, indent=1
        )
        json_file.write_text(text + "\n")
    bad = summary["honest_changed"] or summary["untyped"] or summary["passed_limits"]
    left_over = summary["left"]["children"] > 0 or summary["left"]["files"] > 0
    return 1 if bad or left_over or summary["memory_grown_mib"] >= LIMIT_MIB else 0


def measure(
    arguments: argparse.Namespace, models: Path, scratch: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the checks asked for, with ``models`` for what needs one; return a row per check and a summary."""
    stream = random.Random(arguments.seed)
    import evaluate  # noqa: F401 - its imports are no growth

    save_models(models)
    before, memory = left(scratch), resident_mib()
    found = []
    with model_checks(models) as others:
        for check in (c for c in [*checks(), *others] if arguments.only in ("", c.plugin)):
            found.append(run(check, arguments.n, stream, arguments.step))
            sys.stdout.write(json.dumps(found[-1]) + "\n")
            sys.stdout.flush()
    gc.collect()
    time.sleep(1.0)
    grown = max(resident_mib() - memory, *(f["grown_mib"] for f in found), 0.0)
    summary = {
        "checks": len(found),
        "honest_changed": sum(f["honest_changed"] for f in found),
        "untyped": sum(f["untyped"] for f in found),
        "memory_grown_mib": round(grown, 1),
        "left": {name: count - before[name] for name, count in left(scratch).items()},
        "passed_limits": [f["check"] for f in found if f["one_hostile_delays_s"] >= f["limit_s"]],
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return found, summary


if __name__ == "__main__":
    sys.exit(main())
