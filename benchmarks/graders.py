r"""How often graders err: wrong answers that score, right answers in other spellings that do not.

    python benchmarks/graders.py [--n 100] [--peer trl=DIRECTORY] [--peer verl=DIRECTORY] [--write FILE]

Prints a Markdown table by kind of answer: the bundled graders, exact match as SQuAD normalises it,
math-verify as it comes, and the graders of other libraries from a folder of their own:

    pip install --no-deps --target DIRECTORY trl
    pip install --no-deps --target DIRECTORY verl pylatexenc    # prime_math needs pylatexenc

A grader that wants a form (``\boxed``, ``####``, ``<answer>``) gets each answer in that form, without the
emphasis and full stops that other spellings add.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import re
import string
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from hostile_texts import ANSWER_KINDS, answers
from math_verify import parse, verify

from multitask_rl.contracts import Reward
from multitask_rl.records import Score
from multitask_rl.testing import make_rollout
from multitask_rl_rewards.label_match import LabelMatch
from multitask_rl_rewards.math_answer import MathAnswer
from multitask_rl_rewards.text_match import F1, ExactMatch

Grade = Callable[[str, str], bool]
"""Whether an answer gets the full value for a right answer."""
MATHS = ("number", "fraction", "interval", "set")
TEXTS = ("number", "name", "date", "choice", "code output")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bundled(reward: Reward) -> Grade:
    """Return whether the reward gives its full value."""

    def full(answer: str, right: str) -> bool:
        row = {"reference": right, "prompt": "?", "labels": list("ABCD")}
        (result,) = reward.score([make_rollout(answer, row=row)])
        return isinstance(result, Score) and result.value == 1.0

    return full


def squad(answer: str, right: str) -> bool:
    """Exact match of SQuAD v1.1's normalisation."""

    def normal(text: str) -> str:
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())

    return normal(answer) == normal(right)


def plain_math_verify(answer: str, right: str) -> bool:
    """math-verify on the texts as they are, the reference between dollar signs."""
    return bool(verify(parse(f"${right}$"), parse(answer)))


def bare(answer: str) -> str:
    """Return an answer without the marks around it."""
    return answer.strip(" .*`$\n")


def peers(name: str, directory: Path) -> dict[str, tuple[tuple[str, ...], Grade]]:
    """Return graders of another library by name, with the kinds they are for.

    Args:
        name: ``trl`` or ``verl``.
        directory: where it was installed with ``--target``.
    """
    sys.path.append(str(directory))  # behind what is installed: only the library itself comes from there
    if name == "trl":
        from trl.rewards import accuracy_reward

        def accuracy(answer: str, right: str) -> bool:
            content = f"\\boxed{{{bare(answer)}}}"
            return bool(accuracy_reward([[{"content": content}]], [f"${right}$"])[0] == 1.0)

        return {"TRL `accuracy_reward`": (MATHS, accuracy)}
    if name != "verl":
        raise SystemExit(f"--peer: unknown library {name!r}; known: trl, verl")
    scores = directory / "verl" / "utils" / "reward_score"
    gsm8k, math_reward, dapo, qa = (
        _module(scores / f"{m}.py") for m in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em")
    )
    for package in (
        "verl",
        "verl.utils",
        "verl.utils.reward_score",
    ):  # without what they import: Ray
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(directory.joinpath(*package.split(".")))]
    prime = importlib.import_module("verl.utils.reward_score.prime_math")
    return {
        "verl `gsm8k`": (("number",), lambda a, r: gsm8k.compute_score(f"#### {bare(a)}", r) == 1.0),
        "verl `math_reward`": (
            MATHS,
            lambda a, r: math_reward.compute_score(f"\\boxed{{{bare(a)}}}", r) == 1.0,
        ),
        "verl `math_dapo`": (
            MATHS,
            lambda a, r: bool(dapo.compute_score(f"Answer: {bare(a)}", r)["acc"]),
        ),
        "verl `prime_math`": (
            MATHS,
            lambda a, r: bool(prime.compute_score(f"\\boxed{{{bare(a)}}}", r)[0]),
        ),
        "verl `search_r1_like_qa_em`": (
            TEXTS,
            lambda a, r: bool(qa.em_check(a, r)),
        ),
    }


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--peer: {path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100, help="right answers per kind")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--write", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    graders: dict[str, tuple[tuple[str, ...], Grade]] = {
        "`math_answer`": (MATHS, bundled(MathAnswer(MathAnswer.Config()))),
        "`exact_match`": (TEXTS[:-1], bundled(ExactMatch(ExactMatch.Config()))),
        "`exact_match`, `normalise: false`": (
            TEXTS[-1:],
            bundled(ExactMatch(ExactMatch.Config(normalise=False))),
        ),
        "`f1` (full value)": (TEXTS, bundled(F1(F1.Config()))),
        "`label_match`": (("choice",), bundled(LabelMatch(LabelMatch.Config()))),
        "exact match, SQuAD's normalisation": (TEXTS, squad),
        "math-verify alone": (MATHS, plain_math_verify),
    }
    for peer in arguments.peer:
        name, _, directory = peer.partition("=")
        graders |= peers(name, Path(directory))
    lines = ["| kind | grader | wrong answers that score | right answers that do not |", "|---|---|---|---|"]
    for kind in ANSWER_KINDS:
        cases = list(answers(kind, arguments.n))
        for name, (kinds, grade) in graders.items():
            if kind not in kinds:
                continue
            wrong = [(grade(text, right), right, text) for right, texts, _ in cases for text in texts]
            same = [(not grade(text, right), right, text) for right, _, texts in cases for text in texts]
            cells = []
            for rows in (wrong, same):
                errs = [(right, text) for is_error, right, text in rows if is_error]
                example = f": `{errs[0][1].strip()}` for `{errs[0][0]}`" if errs else ""
                cells.append(f"{len(errs)} of {len(rows)} ({len(errs) / len(rows):.1%}){example}")
            lines.append(f"| {kind} | {name} | {cells[0]} | {cells[1]} |")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
