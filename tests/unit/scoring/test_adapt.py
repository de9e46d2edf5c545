"""Every shape a reward may have, and every way one can be named wrongly."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.config.task import RewardSpec
from multitask_rl.contracts import Constraint, Reward
from multitask_rl.errors import ConfigError, MissingExtraError, PluginError
from multitask_rl.records import Failure, FailureKind, NotApplicable, Rollout, Score, Turn, Verdict
from multitask_rl.scoring.adapt import find_plugin, resolve_reward
from multitask_rl.scoring.grader import Grader
from multitask_rl.testing.builders import make_rollout

FOREIGN = Path(__file__).parents[2] / "fixtures" / "foreign_rewards"


def grade(reference: str, rollouts: list[Rollout], config: dict[str, Any] | None = None) -> list[Any]:
    reward = resolve_reward(RewardSpec(plugin=reference, config=config or {}), "tasks.t.rewards[0]")
    assert isinstance(reward, Reward)
    return Grader("reward", reward, "r").grade(rollouts)


def values(reference: str, rollouts: list[Rollout], config: dict[str, Any] | None = None) -> list[Any]:
    return [r.value if isinstance(r, Score) else r for r in grade(reference, rollouts, config)]


def write(folder: Path, text: str, name: str = "rewards.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_function_gets_only_what_it_asks_for(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def asks(response, reference=None, **row): return len(response) + len(row) + (reference or 0)\n"
        "def by_name(reference, response): return reference * len(response)\n"
        "def first(text, reference): return reference * len(text)\n"
        "def positional(text, /, reference): return reference * len(text)\n"
        "def whole(rollout): return rollout.sample\n"
        "def question(prompt, response): return len(prompt)\n"
        "def with_default(response, missing=5): return missing\n",
    )
    rollout = make_rollout("ab", row={"reference": 10, "x": 1, "prompt": "Why?"}, sample=3)
    expected = {
        "asks": 14,
        "by_name": 20,
        "first": 20,
        "positional": 20,
        "whole": 3,
        "question": 4,
        "with_default": 5,
    }
    assert {name: values(f"{file}:{name}", [rollout])[0] for name in expected} == expected


def test_batch_functions_get_lists_and_rows_that_lack_a_column_fail_alone(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def batch(responses, reference): return [float(a == b) for a, b in zip(responses, reference)]\n"
        "async def later(rollouts): return [r.sample for r in rollouts]\n"
        "def scalar(responses): return 1.0\n",
    )
    rollouts = [
        make_rollout("a", row={"reference": "a"}),
        make_rollout("b"),
        make_rollout("c", row={"reference": "a"}),
    ]
    first, second, third = grade(f"{file}:batch", rollouts)
    assert (first.value, third.value) == (1.0, 0.0)
    assert (second.kind, second.message) == (
        FailureKind.data,
        "the row has no column 'reference' (columns: none)",
    )
    assert values(f"{file}:later", [make_rollout("a", sample=i) for i in range(3)]) == [0, 1, 2]
    failure = grade(f"{file}:scalar", rollouts[:1])[0]
    assert failure.message == "raised TypeError: a batch function returns a list, scalar returned float"


def test_an_async_reward_is_closed_where_a_loop_runs(tmp_path: Path) -> None:
    """In a notebook a loop always runs in the main thread, which closes the rewards at the end of a run."""
    file = write(tmp_path, "async def f(response):\n    return 1\n")
    reward = find_plugin("reward", f"{file}:f", "w").build({})
    assert reward.score([make_rollout("a")]) == [1]

    async def main() -> None:
        reward.close()

    asyncio.run(main())
    reward.close()


def test_async_functions_run_together_and_time_out_alone(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "import asyncio\nfrom multitask_rl.scoring.shapes import with_traits\n"
        "@with_traits(timeout_s=0.2)\n"
        "async def f(response):\n"
        "    await asyncio.sleep(9 if response == 'slow' else 0.05)\n    return 1\n",
    )
    results = grade(f"{file}:f", [make_rollout(t) for t in ("a", "slow", *"bcdefgh")])
    assert [isinstance(r, Score) for r in results] == [True, False, *[True] * 7]
    assert results[1] == Failure(kind=FailureKind.timeout, message="no answer within 0.2 s", source="f")


def test_a_function_that_returns_an_awaitable_is_awaited(tmp_path: Path) -> None:
    file = write(tmp_path, "async def ask(text): return 0.5\ndef f(response): return ask(response)\n")
    assert values(f"{file}:f", [make_rollout(), make_rollout()]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("body", "returned"),
    [
        ("def score(self, rollouts): pass", "NoneType"),
        ("async def score(self, rollouts): return [1.0]", "coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_a_class_that_returns_no_list_is_told_what_it_returned(
    tmp_path: Path, body: str, returned: str
) -> None:
    file = write(
        tmp_path,
        "from multitask_rl.contracts import PluginTraits\n"
        f"class R:\n    traits = PluginTraits()\n    {body}\n",
    )
    result = grade(f"{file}:R", [make_rollout()])[0]
    assert isinstance(result, Failure)
    assert result.message == f"raised TypeError: score(rollouts) returns a list, it returned {returned}"


@pytest.mark.parametrize(("declared", "expected"), [("timeout_s=5.0", False), ("deterministic=True", True)])
def test_a_function_is_cached_only_where_it_says_that_it_is_deterministic(
    tmp_path: Path, declared: str, expected: bool
) -> None:
    file = write(
        tmp_path,
        "from multitask_rl.scoring.shapes import with_traits\n"
        f"@with_traits({declared})\ndef f(responses): return [0.0] * len(responses)\n",
    )
    grader = Grader("reward", resolve_reward(RewardSpec(plugin=f"{file}:f"), "here"), "f")
    assert (grader.traits.deterministic, grader.facts.independent) == (expected, expected)


def test_config_fills_parameters_of_a_function(tmp_path: Path) -> None:
    file = write(tmp_path, "def f(response, limit=3): return float(len(response) > limit)\n")
    assert values(f"{file}:f", [make_rollout("abcd")], {"limit": 9}) == [0.0]
    with pytest.raises(ConfigError, match=r"unknown key 'limti'; did you mean 'limit'\? \(allowed: limit\)"):
        resolve_reward(RewardSpec(plugin=f"{file}:f", config={"limti": 1}), "here")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("True", Score(value=1.0)),
        ("2", Score(value=2.0)),
        ("__import__('numpy').float32(0.5)", Score(value=0.5)),
        ("__import__('numpy').array(0.25)", Score(value=0.25)),
        ("{'score': 0.5, 'acc': True, 'pred': 'x'}", Score(value=0.5, components={"acc": 1.0}, answer="x")),
        ("{'acc': 1}", "returned a mapping without 'score': keys ['acc']"),
        ("float('inf')", "returned inf, not a finite number"),
        ("-10**400", "returned -inf, not a finite number"),
        ("{'score': 0.5, 'guess': 10**400}", Score(value=0.5)),
        ("'0.5'", "returned '0.5', not a number"),
        ("[0.5]", "returned [0.5], not a number; a batch function names its parameter 'responses'"),
        ("1j", "returned 1j, not a number"),
    ],
)
def test_results_are_read_strictly(tmp_path: Path, expression: str, expected: Any) -> None:
    file = write(tmp_path, f"def f(response): return {expression}\n")
    result = grade(f"{file}:f", [make_rollout()])[0]
    if isinstance(expected, str):
        expected = Failure(kind=FailureKind.grader, message=expected, source="r")
    assert result == expected
    assert pickle.loads(pickle.dumps(result)) == expected


def test_plain_function_as_a_constraint(tmp_path: Path) -> None:
    file = write(
        tmp_path, "def long(response): return len(response) / 10 if response[:1] != 'z' else 9**999\n"
    )
    constraint = find_plugin("constraint", f"{file}:long", "here").build({})
    assert isinstance(constraint, Constraint)
    texts = ["a", "a" * 6, "a" * 11, "z"]
    *verdicts, above, huge = Grader("constraint", constraint, "c").grade([make_rollout(t) for t in texts])
    assert verdicts == [Verdict(cost=0.1, violated=False), Verdict(cost=0.6, violated=True)]
    for result, cost in ((above, "1.1"), (huge, "inf")):
        assert isinstance(result, Failure)
        assert result.message == f"returned the cost {cost}, outside [0, 1]"


@pytest.mark.parametrize("name", ["math.py", "code.py", "typing.py", "random.py"])
def test_a_file_named_like_a_standard_module_works_and_shadows_nothing(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, "import math, helper\ndef f(response): return math.sqrt(4.0) + helper.ONE\n", name)
    write(tmp_path, "ONE = 1\n", "helper.py")
    assert values(f"{file}:f", [make_rollout()]) == [3.0]
    import math

    assert "f" not in vars(math)


def test_module_function_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "def f(response): return 1.0\n", "cwd_rewards_module.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    assert values("cwd_rewards_module:f", [make_rollout()]) == [1.0]


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        (
            "def f(): return 1.0",
            "f",
            "here: {file}:f: it takes no response; expected f(response, reference, ...), a batch function "
            "f(responses, ...), or a class with score(rollouts); got ()",
        ),
        (
            "def f(prompts, completions): ...",
            "f",
            "here: {file}:f: the parameter 'completions' belongs to another library's reward functions; "
            "write the plugin as 'trl:{file}:f' and it is used unchanged",
        ),
        ("f = 3", "f", "here: reward '{file}:f' is 3; expected a function or a class with score(rollouts)"),
        (
            "class C:\n    def judge(self, rollouts): ...",
            "C",
            "here: reward '{file}:C': the class C has no method score(rollouts). It has judge(): is it a "
            "constraint?",
        ),
        (
            "def reward(response): ...",
            "rewrad",
            "here: '{file}' has no 'rewrad'; did you mean 'reward'? (it has: reward)",
        ),
        (
            "1 / 0",
            "f",
            "here: the plugin '{file}:f' cannot be loaded: importing '{file}' failed with ZeroDivisionError: "
            "division by zero",
        ),
    ],
)
def test_what_cannot_be_a_reward_says_why(tmp_path: Path, text: str, reference: str, message: str) -> None:
    file = write(tmp_path, text + "\n")
    with pytest.raises(PluginError) as caught:
        resolve_reward(RewardSpec(plugin=f"{file}:{reference}"), "here")
    assert str(caught.value) == message.format(file=file)


@pytest.mark.parametrize("columns", ["'answer'", "None", "[1]", "(c for c in ('answer', 'id'))"])
def test_columns_that_a_configuration_names_are_names(tmp_path: Path, columns: str) -> None:
    text = f"""
class C:
    @staticmethod
    def columns_of(config):
        return {columns}

    def score(self, rollouts): ...
"""
    plugin = find_plugin("reward", f"{write(tmp_path, text)}:C", "here")
    if "for" in columns:
        assert plugin.check({}) == ("answer", "id")
        return
    with pytest.raises(PluginError, match=r"C': its 'columns_of' gives .*, expected names of columns"):
        plugin.check({})


@pytest.mark.parametrize(
    "signature",
    ["decoded_outputs", "completions", "answers", "texts, reference=None", "x: 'Sequence[str]'"],
)
def test_a_batch_function_may_call_its_responses_as_it_likes(tmp_path: Path, signature: str) -> None:
    first = signature.replace(":", ",").partition(",")[0]
    file = write(tmp_path, f"def f({signature}):\n    return [float(len(t)) for t in {first}]\n")
    reward = resolve_reward(RewardSpec(plugin=f"{file}:f"), "here")
    assert reward.score([make_rollout("a"), make_rollout("bcd")]) == [1.0, 3.0]


def test_the_prompt_and_what_config_gives_are_not_taken_for_the_response(tmp_path: Path) -> None:
    text = "def f(prompt, most, text):\n    return len(prompt + text) / most\n"
    text += "def g(prompts, texts):\n    return [len(p + t) for p, t in zip(prompts, texts)]\n"
    file = write(tmp_path, text + "def h(prompt):\n    return 1.0\n")
    rollouts = [make_rollout("a", row={"prompt": "xyz"}), make_rollout("bcd", row={"prompt": ""})]
    assert values(f"{file}:f", rollouts, {"most": 2}) == [2.0, 1.5]
    assert values(f"{file}:g", rollouts) == [4.0, 3.0]
    with pytest.raises(PluginError, match=r"it takes no response; .*; got \(prompt\)"):
        resolve_reward(RewardSpec(plugin=f"{file}:h"), "here")


def test_missing_file_and_module_are_said() -> None:
    with pytest.raises(PluginError, match=r"^here: the plugin file '.*nowhere\.py' does not exist"):
        resolve_reward(RewardSpec(plugin="trl:nowhere.py:f"), "here")
    with pytest.raises(PluginError, match="importing 'no_such_package' failed with ModuleNotFoundError"):
        resolve_reward(RewardSpec(plugin="no_such_package:f"), "here")


def test_trl_functions_run_unchanged() -> None:
    file = FOREIGN / "trl_rewards.py"
    chat = [{"role": "user", "content": "2+2?"}]
    rollouts = [make_rollout(t, row={"prompt": chat}) for t in ("<think>a</think><answer>4</answer>", "4")]
    assert values(f"trl:{file}:format_reward", rollouts) == [1.0, 0.0]
    rows = [{"solution": "4", "task_kind": "math"}, {"solution": "x", "task_kind": "code"}]
    mine, other = values(f"trl:{file}:math_only", [make_rollout("4", row=row) for row in rows])
    assert mine == 1.0
    assert isinstance(other, NotApplicable)
    late = make_rollout("abc")
    late.policy_version = 7
    assert values(f"trl:{file}:slow_judge", [late]) == [3.7]
    assert values(f"trl:{file}:no_kwargs", [make_rollout("4", row=rows[0])]) == [1.0]


def test_a_function_of_trl_gets_what_the_world_said_in_the_completion_ids(tmp_path: Path) -> None:
    file = write(tmp_path, "def f(completions, completion_ids):\n    return [*map(bytes, completion_ids)]\n")
    episode = make_rollout("abc")
    episode.turns = [Turn(num_tokens=2), Turn(num_tokens=1, given_ids=[*b"xy"])]
    reward = resolve_reward(RewardSpec(plugin=f"trl:{file}:f"), "here")
    assert reward.score([episode, make_rollout("abc")]) == [b"abxyc", b"abc"]


def test_a_function_of_trl_without_a_return_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trl_rewards.py"
    file.write_text("def f(completions, **kwargs):\n    [1.0 for c in completions]\n")
    reward = resolve_reward(RewardSpec(plugin=f"trl:{file}:f"), "here")
    with pytest.raises(TypeError, match="a reward function of TRL returns a list, got NoneType"):
        reward.score([make_rollout("4", row={})])


def test_a_verl_function_is_told_the_number_of_turns(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    extra_info['mine'] = 1\n"
        "    return extra_info['num_turns'] + len(extra_info['rollout_reward_scores'])\n"
    )
    row = {"ground_truth": "", "extra_info": {"index": 3}}
    assert values(f"verl:{tmp_path}/turns.py:compute_score", [make_rollout(row=row)] * 2) == [2.0, 2.0]
    assert row["extra_info"] == {"index": 3}


def test_verl_functions_run_unchanged() -> None:
    file = FOREIGN / "verl_rewards.py"
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}, "extra_info": {"index": 3}}
    right, wrong = grade(
        f"verl:{file}:compute_score", [make_rollout(t, row=row) for t in ("... #### 72", "#### 7")]
    )
    assert right == Score(value=1.0, components={"acc": 1.0}, answer="72"), "other text is left out"
    assert wrong.value == 0.0
    other = grade(f"verl:{file}:compute_score", [make_rollout("x", row={**row, "data_source": "other"})])[0]
    assert other.message == "raised NotImplementedError: other (verl_rewards.py:6)"
    plain = {"reference": "72"}
    arguments = {"arguments": {"bonus": 0.5}}
    assert values(f"verl:{file}:plain", [make_rollout("it is 72", row=plain)], arguments) == [1.5]
    assert grade(f"verl:{file}:judged", [make_rollout("x", row=row)])[0].components == {"index": 3.0}
    lacking = grade(f"verl:{file}:plain", [make_rollout("x", row={"other": 1})])[0]
    assert (lacking.kind, lacking.message) == (
        FailureKind.data,
        "raised DataError: the row has no column 'ground_truth' or 'reference' or 'answer' (columns: other)",
    )


def test_foreign_functions_of_the_wrong_signature_are_refused() -> None:
    with pytest.raises(PluginError, match="is not a verl reward function"):
        resolve_reward(RewardSpec(plugin=f"verl:{FOREIGN / 'trl_rewards.py'}:no_kwargs"), "here")
    with pytest.raises(PluginError, match="has no parameter 'completions'"):
        resolve_reward(RewardSpec(plugin=f"trl:{FOREIGN / 'verl_rewards.py'}:plain"), "here")
    with pytest.raises(
        PluginError, match=r"here: nothing follows 'trl'; expected 'trl:package\.module:function'"
    ):
        resolve_reward(RewardSpec(plugin="trl:"), "here")
    with pytest.raises(PluginError, match="the prefix 'verl' is for rewards"):
        find_plugin("constraint", "verl:x.py:f", "here")


def installed(package: str) -> bool:
    return __import__("importlib.util").util.find_spec(package) is not None


@pytest.mark.parametrize("package", ["reasoning_gym", "verifiers"])
def test_a_foreign_package_that_is_missing_says_what_to_install(package: str) -> None:
    if installed(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingExtraError, match=f"pip install '.*{package.replace('_', '-')}"):
        resolve_reward(RewardSpec(plugin=f"{package}:anything"), "here")


@pytest.mark.skipif(not installed("reasoning_gym"), reason="reasoning-gym is not installed")
def test_every_reasoning_gym_verifier_accepts_its_own_answers() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    row = {"prompt": entry["question"], **entry}
    tagged = f"<answer>{entry['answer']}</answer>"
    texts = [f"So {tagged}", entry["answer"], f"{tagged} Again: <answer>", f"{tagged} </answer>", "no idea"]
    *right, wrong = values("reasoning_gym:leg_counting", [make_rollout(t, row=row) for t in texts])
    assert right == [1.0] * 4
    assert wrong < 1.0
    with pytest.raises(PluginError, match="unknown reasoning-gym data set 'leg_countng'; did you mean"):
        resolve_reward(RewardSpec(plugin="reasoning_gym:leg_countng"), "here")


@pytest.mark.skipif(not installed("verifiers"), reason="verifiers is not installed")
def test_a_verifiers_taskset_scores_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOREIGN))
    rollouts = [
        make_rollout("It is 4", row={"idx": 2}),
        make_rollout("5", row={"idx": 2}),
        make_rollout("8", row={"prompt": "4+4?"}),
        make_rollout("8", row={"idx": 77}),
    ]
    results = grade("verifiers:sums_taskset", rollouts, {"taskset": {"size": 5}})
    assert results[0] == Score(value=2.0, components={"correct": 1.0, "length": 7.0})
    assert [r.value for r in results[1:3]] == [0.0, 2.0]
    assert results[3].kind is FailureKind.data
    with pytest.raises(PluginError, match="the verifiers taskset 'no_such_taskset' cannot be loaded"):
        resolve_reward(RewardSpec(plugin="verifiers:no_such_taskset"), "here")
    # tasksets of the package itself: their rewards come from an environment, or from a server that setup asks
    (tmp_path / "nemo.jsonl").write_text(
        '{"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}}\n'
    )
    for name, config, part in (
        ("openenv", {"env": "x"}, "has no reward of its own"),
        ("nemo_gym", {"dataset": str(tmp_path / "nemo.jsonl")}, "gives the model tools"),
        ("gated_taskset", {}, "overrides 'setup'"),
        ("measured_taskset", {}, "has the metric 'passed', which needs a runtime"),
        ("compared_taskset", {}, "has an environment of its own"),
    ):
        with pytest.raises(PluginError, match=f"{part}.*only tasksets that judge one response"):
            resolve_reward(RewardSpec(plugin=f"verifiers:{name}", config={"taskset": config}), "here")


METRIC = """
import datasets
import evaluate

TEXT = datasets.Value("string")

class Same(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": TEXT, "references": TEXT})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        same = [a == b for a, b in zip(predictions, references)]
        return {"same": sum(same) / len(same), "n": len(same)}
"""


@pytest.mark.skipif(not installed("evaluate"), reason="evaluate is not installed")
def test_a_metric_of_evaluate_scores_response_by_response(tmp_path: Path) -> None:
    script = write(tmp_path, METRIC, "same.py")
    rows = [make_rollout(text, row={"reference": "4"}) for text in ("4", "5")]
    results = grade(f"evaluate:{script}", rows)
    assert results == [Score(value=v, components={"n": 1.0}) for v in (1.0, 0.0)]
    with pytest.raises(PluginError, match=r"the metric 'nowhere/metric\.py' cannot be loaded"):
        resolve_reward(RewardSpec(plugin="evaluate:nowhere/metric.py"), "here")


def test_a_trl_reward_gets_the_begun_answer_as_one_message(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def f(prompts, completions):\n"
        "    return [[len(p), c[0]['content']] == [1, 'Well: 4'] for p, c in zip(prompts, completions)]\n",
    )
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Well: "}]
    assert values(f"trl:{file}:f", [make_rollout("4", row={"prompt": chat})]) == [1.0]
    assert len(chat) == 2
