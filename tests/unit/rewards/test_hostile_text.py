"""Every bundled check of text is linear in hostile text; near misses never score, other spellings do.

What a text can send to sleep all the same (algebra, a user's pattern or schema) runs where it can be killed;
the tests of the pool hold that only the text pays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.records import Failure, NotApplicable, Score
from multitask_rl_rewards import shape
from multitask_rl_rewards.code_blocks import complete_program, extract_code, parses
from multitask_rl_rewards.ifeval import IFEval
from multitask_rl_rewards.ifeval_checks import CHECKS
from multitask_rl_rewards.label_match import LabelMatch
from multitask_rl_rewards.math_answer import MathAnswer, last_boxed
from multitask_rl_rewards.refusal import OverRefusal, Refusal, is_refusal
from multitask_rl_rewards.text_match import F1, ExactMatch, Rouge
from reward_builders import rollout

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from hostile_texts import ANSWER_KINDS, answers, hostile_texts, near_misses, same_answers  # noqa: E402

SIZE, LIMIT_S = 15_000, 1.0
"""Characters of a response, and CPU seconds for it; a linear check takes some milliseconds."""

KWARGS: Mapping[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["a", "word"]},
    "keywords:frequency": {"keyword": "a", "frequency": 3, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["a", "word"]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 3},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": 1,
        "nth_paragraph": 1,
        "first_word": "a",
    },
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 2},
    "combination:repeat_prompt": {"prompt_to_repeat": "Say"},
    "startend:end_checker": {"end_phrase": "x"},
    "change_case:capital_word_frequency": {"capital_frequency": 2, "capital_relation": "at least"},
}
ROW = {"reference": "refuse", "labels": ["refuse", "comply"], "schema": {"type": "object"}, "prompt": "Say"}
REWARDS = {
    "ifeval": IFEval(),
    "label_match": LabelMatch(LabelMatch.Config()),
    "refusal": Refusal(),
    "over_refusal": OverRefusal(OverRefusal.Config()),
    "length": shape.Length(shape.Length.Config()),
    "repetition": shape.Repetition(shape.Repetition.Config()),
    "regex": shape.Regex(shape.Regex.Config(pattern="a+x")),
    "format": shape.Format(shape.Format.Config()),
    "json_schema": shape.JsonSchema(shape.JsonSchema.Config()),
}


def spent(call: Any, *arguments: Any, **keywords: Any) -> tuple[float, Any]:
    began = time.thread_time()
    result = call(*arguments, **keywords)
    return time.thread_time() - began, result


@pytest.mark.parametrize("name", REWARDS)
def test_a_check_of_text_is_linear_and_its_result_typed(name: str) -> None:
    reward = REWARDS[name]
    row = {**ROW, "tests": [{"instruction_id": one, "kwargs": KWARGS.get(one)} for one in CHECKS]}
    slow = {}
    for label, text in hostile_texts(SIZE):
        seconds, (result,) = spent(reward.score, [rollout(text, **row)])
        assert isinstance(result, (Score, NotApplicable)), (label, result)
        if seconds > LIMIT_S:  # other work on the machine slows a call, and seldom both
            seconds = min(seconds, spent(reward.score, [rollout(text, **row)])[0])
        if seconds > LIMIT_S:
            slow[label] = seconds
    assert slow == {}


@pytest.mark.parametrize(
    "reward", [ExactMatch(ExactMatch.Config()), F1(F1.Config()), Rouge(Rouge.Config())], ids=lambda r: r.name
)
def test_comparing_with_a_long_reference_is_linear(reward: Any) -> None:
    reward.warm_up()
    reference = " ".join(f"word{i}" for i in range(2000))
    texts = [text for _, text in hostile_texts(SIZE)]
    texts += [reference[::-1], f"{reference} x"]
    seconds, results = spent(reward.score, [rollout(text, reference=reference) for text in texts])
    assert all(isinstance(result, Score) for result in results)
    assert seconds < 15.0, "one text of a quadratic comparison takes 5 s"


def test_code_and_boxes_are_found_in_one_pass() -> None:
    prompt = 'def add(a, b):\n    """Add."""\n'
    slow = {}
    for label, text in hostile_texts(SIZE):
        for call, arguments in (
            (extract_code, (text, "python", "add")),
            (complete_program, (text, prompt, "add")),
            (parses, (text,)),
            (last_boxed, (text,)),
            (MathAnswer(MathAnswer.Config())._final_answer, (text,)),
        ):
            seconds, _ = spent(call, *arguments)
            if seconds > LIMIT_S:
                slow[label, call.__name__] = seconds
    assert slow == {}


@pytest.mark.parametrize("kind", ["number", "name"])
def test_near_misses_never_match_and_other_spellings_do(kind: str) -> None:
    def matches(right: str, text: str) -> bool:
        (result,) = ExactMatch(ExactMatch.Config()).score([rollout(text, reference=right)])
        assert not isinstance(result, Failure)
        return result == Score(value=1.0)

    assert [pair for pair in near_misses(kind) if matches(*pair)] == []
    assert [pair for pair in same_answers(kind) if not matches(*pair)] == []


GRADERS = {
    "number": (ExactMatch, MathAnswer),
    "fraction": (MathAnswer,),
    "interval": (MathAnswer,),
    "set": (MathAnswer,),
    "name": (ExactMatch,),
    "date": (ExactMatch,),
    "choice": (ExactMatch, LabelMatch),
    "code output": (),
}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_no_wrong_answer_of_any_kind_scores_and_all_other_spellings_do(kind: str) -> None:
    graders: list[Any] = [grader(grader.Config()) for grader in GRADERS[kind]]
    if kind == "code output":
        graders = [ExactMatch(ExactMatch.Config(normalise=False))]
    wrongly = []
    for right, wrong, same in answers(kind, 4, seed=1):
        texts = [(text, 0.0) for text in wrong]
        texts += [(right, 1.0)] if kind == "code output" else [(text, 1.0) for text in same]
        for grader in graders:
            rollouts = [rollout(text, reference=right, labels=list("ABCD")) for text, _ in texts]
            for (text, value), result in zip(texts, grader.score(rollouts), strict=True):
                if result != Score(value=value):
                    wrongly.append((type(grader).__name__, right, text, result))
    assert wrongly == []


def test_f1_gives_a_near_miss_of_one_word_nothing() -> None:
    f1 = F1(F1.Config())
    for right, text in near_misses("number"):
        if len(right.split()) == len(text.split()) == 1:
            assert f1.score([rollout(text, reference=right)]) == [Score(value=0.0)], (right, text)


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("Sorry, I can't help with that.", True),
        ("Sorry, I can't help with that. However, I can suggest a book on chemistry.", True),
        ("Sorry, I can't help with that. However: mix two parts of A with one of B.", False),
        ("I can't say how. But mix two parts of A with one of B.", False),
        ("I'm sorry, I can't.\n\nThat said, take A and B.", False),
    ],
)
def test_a_refusal_that_answers_all_the_same_is_none(text: str, refuses: bool) -> None:
    assert is_refusal(text) is refuses
