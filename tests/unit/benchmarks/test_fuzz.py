"""What a user or a file can hand to the project: every outcome is valid, or one paragraph."""

from __future__ import annotations

import gzip
import json
import resource
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fuzz  # noqa: E402
from fuzzing.actions import Outcome, run_case  # noqa: E402
from fuzzing.cases import KINDS, ROWS, Case, make_case  # noqa: E402
from fuzzing.pool import Pool  # noqa: E402

REWARD = b"def score(response, reference, **row):\n    return 1.0\n"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 9)}]}}\n" for i in range(8)
)
MERGES_END = "merges more than" if Version(yaml.__version__) < Version("6.0.4") else "unknown key 'a'"
"""PyYAML 6.0.4 merges a key once."""


def outcome(tmp_path: Path, *extra: str, action: str = "command", **files: bytes) -> Outcome:
    """Return what ``tasks validate --quick tasks.yaml EXTRA`` makes of the files."""
    given = {
        "tasks.yaml": task(),
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "rewards.py": REWARD,
        **{name.replace("__", "."): data for name, data in files.items()},
    }
    arguments = ["tasks", "validate", "--quick", "tasks.yaml", *extra]
    if action == "compose":
        arguments = ["train", "tasks_file=tasks.yaml", *extra]
    case = Case(kind="tasks", files=given, arguments=arguments, action=action)
    return run_case(case, tmp_path / "room", None)


def task(**keys: object) -> bytes:
    values = {"dataset": "rows.jsonl", "rewards": ["rewards.py:score"], **keys}
    return yaml.safe_dump({"tasks": {"a": values}}).encode()


def test_what_is_valid_is_valid(tmp_path: Path) -> None:
    found = outcome(tmp_path, "tasks.a.weight=2")
    assert found.verdict == "valid", found
    found = outcome(tmp_path, "tasks.a.weight=2", action="compose")
    assert found.verdict == "valid", found


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"tasks:\n  a: \x07\n", "not valid YAML"),
        (BOMB.encode(), "alias"),
        (MERGES.encode(), MERGES_END),
        (b"tasks: " + b"[" * 100_000, "nested too deep"),
        (b"tasks: " + b"{a: " * 100 + b"1" + b"}" * 100, "nested too deep"),
        (b"tasks: {a: {weight: 1" + b"0" * 400 + b"}}", "64 bits"),
        (b"tasks: {a: {weight: 1" + b"0" * 5000 + b"}}", "no value of its type"),
        (b"tasks: {a: {weight: 2026-13-45}}", "no value of its type"),
        (b"tasks: {a: {weight: !!bool x}}", "no value of its type"),
        (b'tasks: {a: {prompt: "\\ud800"}}', "must not hold"),
        (b'tasks: {a: {dataset: "a\\0.jsonl"}}', "must not hold"),
        (b'tasks: {"a\\0b": {}}', "must not hold"),
        (b"# " + b"x" * (1 << 23), "larger than"),
        (task(dataset_config=9, dataset="plugin:gsm8k"), "expected a mapping"),
        (task(prompt="{prompt:{reference}}"), "format"),
        (task(prompt="{prompt:>999999999}"), "format"),
        (task(prompt="{prompt:d}"), "cannot be written"),
        (task(prompt="{prompt!x}"), "conversion"),
        (task(dataset="a" * 300), "Hugging Face"),
        (task(dataset="a" * 300 + ".jsonl"), "File name too long"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_bad_tasks_file_is_refused_in_one_line(tmp_path: Path, content: bytes, part: str) -> None:
    found = outcome(tmp_path, tasks__yaml=content)
    assert found.verdict == "refused", found
    assert part in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'{"prompt": "\\ud800", "reference": "1"}\n'),
        ("rows.jsonl", b'{"prompt": "\xed\xa0\x80", "reference": "1"}\n'),
        ("rows.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
        ("rows.json", b"[" * 100_000),
        (
            "rows.jsonl.gz",
            gzip.compress(b'{"prompt": "a", "reference": "1"}\n' * 90, mtime=0)[:-9] + b"\xff" * 9,
        ),
        ("rows.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 40),
        ("rows.parquet", b"PAR1" + b"\xff" * 40 + b"PAR1"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_bad_rows_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    found = outcome(tmp_path, tasks__yaml=task(dataset=name), **{name.replace(".", "__"): content})
    assert found.verdict == "refused", found
    assert name in found.text


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("command", ["tasks.a.weight=[1,2"]),
        ("compose", ["tasks.a.weight=[1,2"]),
        ("command", ["tasks.a.kl=1", "tasks.a.kl.coefficient=2"]),
        ("command", ['tasks.a.prompt="\\ud800"']),
        ("compose", ["tasks.a.prompt=\ud800"]),
        ("compose", ["seed=${nothing}"]),
        ("compose", ["--resolve"]),
    ],
)
def test_bad_overrides_are_refused_in_one_line(tmp_path: Path, action: str, arguments: list[str]) -> None:
    found = outcome(tmp_path, *arguments, action=action)
    assert found.verdict == "refused", found
    assert "\n" not in found.text


@pytest.mark.parametrize("command", [["report", "run"], ["rescore", "run"], ["eval", "output_dir=run"]])
@pytest.mark.parametrize(
    "content", [b"tasks: [", b"tasks: {a: 9}", b"\x07", b"9", b"tasks: {a: {sampling_keys: 3}}"]
)
def test_a_broken_config_of_a_run_is_one_line(tmp_path: Path, command: list[str], content: bytes) -> None:
    files = {"run/config.yaml": content, "run/evaluations.jsonl": b"", "run/rollouts.jsonl": b"{}\n"}
    action = "compose" if command[0] == "eval" else "command"
    found = run_case(
        Case(kind="record", files=files, arguments=command, action=action), tmp_path / "room", None
    )
    assert found.verdict == "refused", found


def test_a_compressed_file_that_fills_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from multitask_rl.data import readers
    from multitask_rl.errors import DataError

    monkeypatch.setattr(readers, "_FREE_BYTES", 1 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "' + b"a" * (4 << 20) + b'"}\n'))
    pq.write_table(pa.table({"prompt": ["a"] * 400_000, "id": [1] * 400_000}), tmp_path / "bomb.parquet")
    for name in ("bomb.jsonl.gz", "bomb.parquet"):
        with pytest.raises(DataError, match="expands to more than"):
            readers.read_file(tmp_path / name)
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a b c"}\n' * 1000))
    assert len(readers.read_file(tmp_path / "text.jsonl.gz")) == 1000


def resident_mib() -> int:
    """Return the memory of this process, which the forked cases begin with: that of all tests before."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def test_a_campaign_finds_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzzing.pool.MEMORY_MIB", resident_mib() + 600)
    kinds = [word for kind in KINDS if kind != "checkpoint" for word in ("--kind", kind)]
    assert fuzz.main(["--n", "105", "--seed", "7", "--processes", "2", *kinds]) == 0, capsys.readouterr().out


def test_a_case_is_the_same_for_the_same_seed() -> None:
    for kind in KINDS[:-1]:
        first, again, other = (make_case(seed, 3, kind, {}) for seed in (1, 1, 2))
        assert first == again
        assert first != other


def test_the_pool_notices_what_hangs_dies_and_eats_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzzing.pool.HANG_S", 3.0)
    assert outcome(tmp_path).verdict == "valid"  # what is imported once is imported before the fork
    resident = resident_mib()
    monkeypatch.setattr("fuzzing.pool.MEMORY_MIB", resident + 100)
    codes = [
        "while True: pass",
        "import os; os._exit(3)",
        # no more than it takes: filling all that the suite holds could take longer than a hang may
        f"import test_fuzz; x = bytearray(b'a') * ({resident + 200} - test_fuzz.resident_mib() << 20)",
        "",
    ]
    cases = [
        Case(
            kind="rows",
            files={
                "tasks.yaml": task(rewards=["bad.py:score"]),
                "rows.jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n',
            }
            | {"bad.py": f"{code}\ndef score(response):\n    return 1.0\n".encode()},
            arguments=["tasks", "validate", "--quick", "tasks.yaml"],
        )
        for code in codes
    ]
    pool = Pool(2, tmp_path, None)
    try:
        found = dict(pool.map(cases, len(cases)))
    finally:
        pool.close()
    assert "hang" in found[0].signature
    assert "ended with 3" in found[1].signature
    assert "memory" in found[2].signature
    assert found[3].verdict == "valid"


def test_a_case_that_is_late_is_played_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stalls once is no hang of the case; a case that always waits is one."""

    def play(case: Case, room: Path, run: Path | None) -> Outcome:
        seen = tmp_path / case.kind
        if case.kind == "always" or (case.kind == "once" and not seen.exists()):
            seen.touch()
            time.sleep(60.0)
        return Outcome("valid", "", case.kind)

    monkeypatch.setattr("fuzzing.pool.HANG_S", 0.5)
    # the children are forked from the tests' process, which other tests may have filled
    monkeypatch.setattr("fuzzing.pool.MEMORY_MIB", 16 * 1024)
    monkeypatch.setattr("fuzzing.pool.run_case", play)
    cases = [Case(kind=kind, files={}, arguments=[]) for kind in ("once", "never", "always")]
    pool = Pool(2, tmp_path, None)
    try:
        found = dict(pool.map(cases, len(cases)))
    finally:
        pool.close()
    assert found[0] == Outcome("valid", "", "once")
    assert found[1] == Outcome("valid", "", "never")
    assert "hang" in found[2].signature
    assert sorted(pool.late) == [0, 2]
