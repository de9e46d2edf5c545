"""The author's kit: the contract suites must catch what they claim to catch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli.plugins import describe, main
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.plugins import REWARDS, list_plugins
from multitask_rl.records import SamplingParams, Verdict
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.testing import FakeEngine, assert_constraint_contract, assert_reward_contract
from multitask_rl.testing.check import check_plugin
from multitask_rl.testing.scaffold import KINDS, scaffold

HEAD = (
    "from multitask_rl.scoring.shapes import with_traits\nfrom multitask_rl.contracts import PluginTraits\n"
)
ROW = {"prompt": "What is 2 + 2?", "reference": "4"}


def write(folder: Path, body: str) -> str:
    path = folder / "plugin.py"
    path.write_text(HEAD + body)
    return f"{path}:f"


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("def f(response, reference): return 1 / len(response)", "hostile responses are graded without"),
        (
            "@with_traits(low=0, high=1)\ndef f(response, reference): return float('4' in 'x4' + response)",
            "non-answers earn less than the full score: full score for: empty",
        ),
        (
            "@with_traits(low=0, high=1)\ndef f(response, reference): return 0.5 * (response == reference)",
            "the gold answer earns the full score: 0.5, expected 1",
        ),
        (
            "@with_traits(low=0, high=1, higher_is_better=False)\n"
            "def f(response, reference): return float('4' not in 'x4' + response)",
            "non-answers earn less than the full score: full score for: empty",
        ),
        (
            "@with_traits(low=0, high=1, higher_is_better=False)\ndef f(response, reference): return 0.5",
            "the gold answer earns the full score: 0.5, expected 0",
        ),
        (
            "@with_traits(higher_is_better=False)\ndef f(response, reference): return response == reference",
            "the gold answer scores at least as well as any non-answer: 1",
        ),
        (
            "@with_traits(deterministic=True)\n"
            "def f(response, reference, n=[]):\n    n.append(1)\n    return float(len(n))",
            "deterministic, as it declares",
        ),
        (
            "@with_traits(deterministic=True)\n"
            "def f(responses, reference): return [float(len(responses))] * len(responses)",
            "does not depend on its batch",
        ),
        (
            "import threading\n@with_traits(deterministic=True)\ndef f(response, reference):\n"
            "    return float(threading.current_thread() is threading.main_thread())",
            "the same from another thread",
        ),
        ("def f(responses, reference): return [1.0]", "returned 1 result for 8 responses"),
        ("def f(response): return None", "a response gets a score: every result is None"),
        (
            "def f(response, rollout, **row):\n    rollout.row['reference'] = 'x'\n    return 1.0",
            "leaves the rows as they are: it changes reference, which other responses and plugins read",
        ),
        (
            "def f(response, **row): return float(row['reference'] == response)",
            "raised KeyError: 'reference' (plugin.py:3); name what it reads: as a parameter, or in `needs`",
        ),
        ("@with_traits(needs=('absent',))\ndef f(response): return 1.0", "is called: "),
    ],
)
def test_the_contract_suite_catches(tmp_path: Path, body: str, finding: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_reward_contract(write(tmp_path, body), row=ROW, gold="4")
    assert finding in str(caught.value)


def test_a_sound_reward_passes(tmp_path: Path) -> None:
    body = "@with_traits(low=0, high=1)\ndef f(response, reference): return float(response == reference)"
    assert_reward_contract(write(tmp_path, body), row=ROW)


@pytest.mark.parametrize("range_", ["low=0, high=1, ", "low=0, ", ""])
def test_a_sound_reward_of_which_less_is_better_passes(tmp_path: Path, range_: str) -> None:
    traits = f"@with_traits({range_}higher_is_better=False)\n"
    body = f"{traits}def f(response, reference): return float(response != reference)"
    assert_reward_contract(write(tmp_path, body), row=ROW)


def test_a_sound_reward_of_trl_passes(tmp_path: Path) -> None:
    plugin = write(tmp_path, "def f(completions, reference): return [float(c == '4') for c in completions]")
    assert_reward_contract(f"trl:{plugin}", row=ROW)


def test_a_failure_on_every_row_is_one_finding(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_reward_contract(write(tmp_path, "def f(response): return '1'"), row={"prompt": "2 + 2?"})
    assert str(caught.value).count("returned '1', not a number") == 1


def test_constraint_suite_tells_accepted_from_violating(tmp_path: Path) -> None:
    plugin = write(
        tmp_path, "@with_traits(deterministic=True)\ndef f(response): return float('bad' in response)"
    )
    assert_constraint_contract(plugin, row=ROW, accepted="fine", violating="so bad")
    with pytest.raises(AssertionError, match="refuses the violating response: Verdict"):
        assert_constraint_contract(plugin, row=ROW, violating="fine")


def test_check_reports_kind_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = write(
        tmp_path,
        "@with_traits(low=0, high=1, deterministic=True)\n"
        "def f(response, reference): return float(response == reference)",
    )
    assert main(["check", sound]) == 0
    assert "all 13 checks passed" in capsys.readouterr().out
    broken = tmp_path / "broken.py"
    broken.write_text("def f(response): return 'x'\n")
    assert main(["check", f"{broken}:f"]) == 1
    assert "FAIL  hostile responses are graded without an error: returned 'x', not a number" in (
        capsys.readouterr().out
    )
    broken.write_text("def f(response): return 1 / len(response.strip())\n")
    assert main(["check", f"{broken}:f"]) == 1
    assert "ZeroDivisionError: division by zero (broken.py:1), for: empty, blank" in capsys.readouterr().out
    broken.write_text("def f(response, word): return 1 / 0\n")
    assert main(["check", f"{broken}:f"]) == 1, "a reward that was never called has shown nothing"
    shown = capsys.readouterr().out
    assert re.search(r"FAIL  is called: .* no column 'word' .*; give a row that has it: --row", shown)
    assert "ok  " not in shown, "no other check has tried anything"
    assert main(["check", "no_such_reward"]) == 2
    assert "no plugin 'no_such_reward' is installed; " in capsys.readouterr().err
    assert main([]) == 2


def test_a_class_that_judges_is_checked_as_a_constraint(tmp_path: Path) -> None:
    body = (
        "class C:\n    traits = PluginTraits()\n    def judge(self, rollouts): return [0.0] * len(rollouts)\n"
    )
    report = check_plugin(write(tmp_path, body).replace(":f", ":C"))
    assert report.kind == "constraint"
    assert report.passed, report.text()


def test_plugins_list_shows_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "rewards"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_plugins(REWARDS))
    assert any(line.startswith("rewards  exact_match") for line in lines)
    assert all(describe(info).partition(" [reads")[0] for info in list_plugins(REWARDS))
    assert next(line for line in lines if line.startswith("rewards  refusal ")).endswith("[reads reference]")
    assert [main(["list", kind]) for kind in KINDS] == [0] * len(KINDS)


@pytest.mark.parametrize("name", ["Bad", "1st", "class", "a-b", ""])
def test_scaffold_refuses_unusable_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a plugin"):
        scaffold("reward", name, tmp_path)


def test_scaffold_never_overwrites(tmp_path: Path) -> None:
    scaffold("reward", "twice", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        scaffold("constraint", "twice", tmp_path)


def test_what_the_scaffold_says_of_a_kind_is_english(tmp_path: Path) -> None:
    for kind in KINDS:
        target = scaffold(kind, f"own_{kind}", tmp_path)
        for name in ("README.md", "pyproject.toml"):
            text = (target / name).read_text(encoding="utf-8")
            assert f"kind: {kind})" in text or f"Plugin of multitask-rl: {kind}" in text
            assert "A algorithm" not in text
            assert "A environment" not in text


def test_fake_engine_depends_on_prompt_seed_and_weights_only() -> None:
    engine = FakeEngine()
    request = GenerationRequest(prompt_ids=[5, 6], sampling=SamplingParams(max_new_tokens=9), seeds=range(8))
    first = engine.generate([request, request])
    assert first[0] == first[1] == engine.generate([request])[0]
    assert len({tuple(g.response_ids) for g in first[0]}) > 4
    for generation in first[0]:
        assert len(generation.rollout_logprobs) == len(generation.response_ids) <= 9
        assert (generation.finish_reason == "stop") == (generation.response_ids[-1] == 0)
    engine.update_weights({}, 4)
    assert engine.policy_version == 4
    assert engine.generate([request])[0] != first[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os\ndef f(response):\n    os._exit(0)\n", "ended with code 0"),
        ("def f(response):\n    raise KeyboardInterrupt\n", "raised KeyboardInterrupt"),
        (
            "import time\nfrom multitask_rl.scoring.shapes import with_traits\n"
            "@with_traits(timeout_s=0.5)\ndef f(response):\n    time.sleep(60)\n",
            "no result within its time limit of 0.5 s",
        ),
        (
            "import time\nfrom multitask_rl.scoring.shapes import with_traits\n"
            "@with_traits(timeout_s=0.5)\ndef f(response):\n"
            "    time.sleep(60 if len(response) > 10000 else 0)\n    return 1.0\n",
            "1 of 8 hostile responses exceed its limit of time or memory",
        ),
    ],
    ids=["exits", "interrupts", "hangs", "hangs-on-one"],
)
def test_the_check_says_what_a_plugin_that_hangs_or_exits_does(tmp_path: Path, body: str, said: str) -> None:
    report = check_plugin(write(tmp_path, body))
    assert not report.passed
    assert said in report.text()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os\nos._exit(0)\n", "ends its process with code 0"),
        ("import sys\nsys.exit('no model here')\n", "failed with SystemExit: no model here"),
        ("import os\nos.kill(os.getpid(), 11)\n", "ends its process by SIGSEGV"),
        (
            "import os\nfrom multitask_rl.contracts import PluginTraits\nclass f:\n"
            "    traits = PluginTraits(isolate=False)\n    def score(self, rollouts):\n        os._exit(5)\n",
            "ends its process with code 5",
        ),
    ],
    ids=["import", "sys.exit", "crash", "call-in-trainer"],
)
def test_the_command_names_a_plugin_that_ends_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    reference = write(tmp_path, body)
    assert main(["check", reference]) == PluginError.exit_code
    error = capsys.readouterr().err
    assert said in error
    assert reference in error


def test_the_reward_of_the_readme_passes_its_own_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says that the function is enough, and names the command that checks it."""
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    example = re.search(r"`(def brevity\(.*)`, named", page)
    assert example is not None
    (tmp_path / "my_rewards.py").write_text(example[1] + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "my_rewards.py:brevity"]) == 0


def test_the_suite_checks_explanations() -> None:
    class Explains:
        traits = PluginTraits(isolate=False)

        def judge(self, rollouts):
            return [Verdict(cost=0.0, violated=False)] * len(rollouts)

        def explain(self, rollouts, verdicts):
            return ["because"] * len(verdicts)

    assert_constraint_contract(Explains(), row={})

    class TooFew(Explains):
        def explain(self, rollouts, verdicts):
            return ["because"]

    with pytest.raises(AssertionError, match=r"explains each violation .* returned 1 explanations for 8"):
        assert_constraint_contract(TooFew(), row={})

    class Isolated(Explains):
        traits = PluginTraits()

    with pytest.raises(AssertionError, match="does not declare isolate=False"):
        assert_constraint_contract(Isolated(), row={})


def test_a_report_names_the_columns_that_a_function_reads_and_checks_that_were_not_tried(tmp_path):
    plugin = write(
        tmp_path, "def f(response, reference, level=1):\n    return float(response == reference)\n"
    )
    told = check_plugin(plugin).text()
    assert "not deterministic, reads reference, 30 s" in told.splitlines()[0]
    assert "does not depend on its batch: not tried, it does not declare deterministic" in told


BAD_FACTOR = """from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardDecision


class f(Guard):
    def observe(self, step, evaluations, confirm=None):
        return GuardDecision(judged_good=True)

    def lr_factor(self, step):
        return 5.0

    def state_dict(self):
        return {}

    def load_state_dict(self, state, renamed=None):
        pass
"""


@pytest.mark.parametrize(
    ("plugin", "suite", "found"),
    [
        ("def f(response): return 1 / len(response)\n", "reward(NAME, row={})", "division by zero"),
        (BAD_FACTOR, "guard(NAME)", "not checked: python -O"),
    ],
)
def test_under_python_O_no_check_passes_that_was_not_made(
    tmp_path: Path, plugin: str, suite: str, found: str
) -> None:
    call, _, rest = suite.partition("(")
    code = f"from multitask_rl.testing import assert_{call}_contract as check\n"
    code += f"NAME = {write(tmp_path, plugin)!r}; check({rest}"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "AssertionError: the plugin breaks its contract" in done.stderr
    assert found in done.stderr
