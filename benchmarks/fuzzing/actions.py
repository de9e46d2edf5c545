"""What runs a case, in the process that calls: the outcome, and whether it is one that is allowed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fuzzing.cases import Case
from multitask_rl.errors import MultitaskRLError

_LONGEST = 4000
"""Characters of an error that a person still reads."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case."""

    verdict: str
    """``valid``, ``refused`` (one paragraph of a foreseen error), or ``crash``."""
    signature: str = ""
    """What a crash has in common with others: the exception and where it was raised."""
    text: str = ""
    """The error, or the traceback of a crash."""


def run_case(case: Case, room: Path, run: Path | None) -> Outcome:
    """Run ``case`` in ``room``, an empty folder to be: what is there is removed first.

    Args:
        case: the case.
        room: the folder.
        run: output directory of a run to resume (action ``resume``).
    """
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    for name, data in case.files.items():
        (room / name).parent.mkdir(exist_ok=True)
        (room / name).write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    before, names = os.getcwd(), dict(sys.modules)
    os.chdir(room)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _quiet():
            _ACTIONS[case.action](case, run)
    except SystemExit as error:  # argparse: usage, exit code 2
        return _judge("refused" if error.code == 2 else "valid", out.getvalue(), err.getvalue()[-_LONGEST:])
    except MultitaskRLError as error:
        from multitask_rl.cli import error_line

        return _judge("refused", out.getvalue(), error_line(str(error)))
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return Outcome("crash", _signature(error), "".join(traceback.format_exception(error))[-6000:])
    finally:
        os.chdir(before)
        for name in sys.modules.keys() - names.keys():
            if getattr(sys.modules[name], "__file__", None) and str(room) in str(sys.modules[name].__file__):
                del sys.modules[name]
    return _judge("valid", out.getvalue(), err.getvalue())


def _judge(verdict: str, out: str, text: str) -> Outcome:
    """Return ``verdict`` unless what is shown of it harms a terminal or is too long to read."""
    if verdict == "refused" and len(text) > _LONGEST:
        return Outcome("crash", "error text too long", text[:300])
    if verdict == "refused" and not text.strip():
        return Outcome("crash", "error without text", text)
    if found := _CONTROL.search(out + text):
        place = re.sub(r"\W.*", "", text.removeprefix("error: "))[:20]
        return Outcome(
            "crash", f"control characters in what is shown {place}", f"{found[0]!r} in {(out + text)[:500]!r}"
        )
    return Outcome(verdict, "", text)


def _signature(error: BaseException) -> str:
    """Return the exception's type and the last frame of ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "multitask_rl" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}"


def _command(case: Case, run: Path | None) -> None:
    from multitask_rl.cli import run_command

    run_command(case.arguments)


def _compose(case: Case, run: Path | None) -> None:
    """Compose the configuration as ``train`` and ``eval`` do and read the tasks; no model, no data."""
    from multitask_rl.cli.train import compose_and_run
    from multitask_rl.config.run import RunConfig
    from multitask_rl.run.plan import load_specs
    from multitask_rl.step.task_state import build_algorithms

    def check(config: RunConfig) -> None:
        build_algorithms(load_specs(config))

    compose_and_run(case.arguments[1:], "eval", check)


def _rescore(case: Case, run: Path | None) -> None:
    """Run ``rescore`` with a pool that scores in this process: starting workers takes seconds."""
    from multitask_rl.cli import rescore, run_command
    from multitask_rl.records import Score, Scored

    class InProcess:
        def __init__(self, specs: Any, *_: Any, **__: Any) -> None:
            self._specs = specs

        def start(self) -> None: ...

        def close(self) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def score(self, rollouts: list[Any]) -> list[Scored]:
            return [
                Scored(
                    rollout=r,
                    reward=1.0,
                    breakdown={spec.name: Score(value=1.0) for spec in self._specs[r.prompt.task].rewards},
                )
                for r in rollouts
            ]

    with patch.object(rescore, "RewardPool", InProcess):
        run_command(case.arguments)


def _resume(case: Case, run: Path | None) -> None:
    """Restore a checkpoint with the case's files; unless the manifest is what was changed, it is right."""
    from multitask_rl.config.run import CheckpointConfig
    from multitask_rl.run.manifest import write_manifest
    from multitask_rl.run.store import RunStore

    assert run is not None, "no run was made"
    source = checkpoint_of(run)
    here = Path("checkpoints") / source.name
    here.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in case.files:
            (here / path.name).symlink_to(path)
    (here / "state.json").write_bytes(case.files["state.json"])
    if case.mutated == "manifest.json":
        (here / "manifest.json").write_bytes(case.files["manifest.json"])
    else:
        facts = json.loads(case.files["facts.json"])
        write_manifest(here, facts if isinstance(facts, dict) else {"entry": facts})
    # one checkpoint by its name, as a user gives it, or the newest of the run, as a restart takes it
    resume = str(here) if len(case.files[case.mutated]) % 2 else "auto"
    store = RunStore(Path.cwd(), CheckpointConfig(resume=resume), track=False)
    try:
        trainer = _trainer(run)
        store.resume(trainer.parts.state, trainer.config, trainer.plan.specs)
    finally:
        store.close()


def checkpoint_of(run: Path) -> Path:
    """Return the directory of the run's first checkpoint."""
    return min((run / "checkpoints").glob("step_*"))


def read_checkpoint(run: Path) -> dict[str, bytes]:
    """Return what the kind ``checkpoint`` changes: the state, the manifest, the facts in the manifest."""
    files = {name: (checkpoint_of(run) / name).read_bytes() for name in ("state.json", "manifest.json")}
    return {**files, "facts.json": json.dumps(json.loads(files["manifest.json"])["facts"]).encode()}


_ACTIONS: dict[str, Callable[[Case, Path | None], None]] = {
    "command": _command,
    "compose": _compose,
    "rescore": _rescore,
    "resume": _resume,
}


@lru_cache(maxsize=1)
def _trainer(run: Path) -> Any:
    """Return a trainer of the run in ``run``, open: made once in each process."""
    from multitask_rl.config.run import recorded_config
    from multitask_rl.trainer import Trainer

    before = Path.cwd()
    os.chdir(run.parent)
    try:
        trainer = Trainer.from_config(recorded_config(run))
        trainer.evaluate()
    finally:
        os.chdir(before)
    return trainer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def make_run(directory: Path) -> Path:
    """Train a tiny actor for two steps; return the run's output directory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from multitask_rl.cli import main

    words = {"<pad>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate("0123456789abcdefgh +=?>")}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        directory / "actor"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = Qwen2Config(vocab_size=len(words), num_key_value_heads=2, eos_token_id=1, pad_token_id=0, **sizes)
    Qwen2ForCausalLM(shape).save_pretrained(directory / "actor")
    from fuzzing.cases import REWARD_FILE, ROWS

    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "rewards.py").write_bytes(REWARD_FILE)
    (directory / "tasks.yaml").write_text(
        "tasks:\n"
        "  sums: {dataset: rows.jsonl, rewards: ['rewards.py:score'], curriculum: {by: level}}\n"
        "  words: {type: ppo, dataset: rows.jsonl, rewards: ['rewards.py:score'], kl: {coefficient: 0.1}}\n"
        "  costs:\n    dataset: rows.jsonl\n    rewards: ['rewards.py:score']\n"
        "    constraints: [{plugin: 'rewards.py:score', mode: lagrangian, limit: 0.5}]\n"
    )
    before = Path.cwd()
    os.chdir(directory)
    try:
        code = main(
            [
                *(
                    "train",
                    "tasks_file=tasks.yaml",
                    "model.name_or_path=actor",
                    "output_dir=run",
                    "max_steps=2",
                ),
                *(
                    "num_threads=1",
                    "rollout.max_new_tokens=2",
                    "batch.prompts_per_step=6",
                    "batch.group_size=2",
                ),
                *("eval.every=1", "eval.num_prompts=2", "checkpoint.every=2", "scoring.num_workers=1"),
                "tracking.trackers=[jsonl]",
            ]
        )
    finally:
        os.chdir(before)
    if code != 0:
        raise SystemExit(f"the run whose checkpoint is fuzzed ended with {code}")
    return directory / "run"
