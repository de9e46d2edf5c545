"""Objects given from Python become what a tasks file could hold."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest

from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import RewardSpec
from multitask_rl.errors import ConfigError, DataError, PluginError
from multitask_rl.plugins import REWARDS, load_plugin
from multitask_rl.run.objects import name_objects, plugin_reference
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.testing import make_rollout

LOCK = threading.Lock()
ROWS = [{"prompt": f"{i}", "reference": "x"} for i in range(6)]


def shout(response: str) -> float:
    """Return 1 for a response in capitals."""
    return float(response.isupper())


class Suffix:
    """A reward that holds something."""

    def __init__(self, end: str) -> None:
        self.end = end

    def __call__(self, response: str) -> float:
        return float(response.endswith(self.end))


def test_functions_are_named_and_what_no_worker_can_import_is_pickled(tmp_path: Path) -> None:
    assert plugin_reference(shout, tmp_path) == f"{shout.__module__}:shout"
    limit = 3
    for value, good, bad in (
        (lambda response: float(len(response) < limit), "ab", "abcd"),
        (Suffix("!"), "hey!", "hey"),
    ):
        reference = plugin_reference(value, tmp_path / "plugins")
        assert reference == plugin_reference(value, tmp_path / "plugins"), "the same object, the same name"
        loaded = load_plugin(REWARDS, reference)
        assert (loaded(good), loaded(bad)) == (1.0, 0.0)
    with pytest.raises(PluginError, match="pickling it failed"):
        plugin_reference(lambda response, lock=LOCK: 0.0, tmp_path)
    with pytest.raises(PluginError, match="a reward or constraint is a name, a function"):
        plugin_reference(3, tmp_path)


def test_functions_of_trl_and_verl_are_called_as_these_libraries_call_them(tmp_path: Path) -> None:
    def right(prompts, completions, answer, **kwargs):
        return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    given = {"t": {"dataset": ROWS, "rewards": [right, compute_score]}}
    config, _ = name_objects(RunConfig(output_dir=str(tmp_path)), given, None)
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
    for reference, name in zip(config.tasks["t"]["rewards"], ("right", "compute_score"), strict=True):
        reward = resolve_reward(RewardSpec(plugin=reference), "t")
        assert reference.endswith(f":{name}")
        assert reward.score([make_rollout("4", row=row), make_rollout("5", row=row)]) == [1.0, 0.0]


SCRIPT = """
LETTERS = set({letters})
class Judge:
    limit = {limit}
    def score(self, rollouts):
        return [sum(c in LETTERS for c in r.response) < self.limit for r in rollouts]
def among(ends):
    class Ends:
        size = 1
    return lambda response: response in ends
"""


def test_an_object_keeps_its_name_where_a_script_is_started_again(tmp_path: Path) -> None:
    def names(letters: list[int], limit: int = 1, moved: str = "") -> list[str]:
        script: dict[str, Any] = {"__name__": "__main__"}
        exec(moved + SCRIPT.format(letters=letters, limit=limit), script)
        values = [script["Judge"](), script["among"](frozenset(letters)), script["among"]]
        return [plugin_reference(value, tmp_path) for value in values]

    first = names([0, 8])  # a set of 0 and 8 gives them in the order they were added
    assert first == names([8, 0], moved="# a comment\n" * 5)
    judge, reward, maker = names([0, 8], limit=2)
    assert judge != first[0]
    assert [reward, maker] == first[1:]
    assert names([0, 9])[1] != first[1]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        datasets.Dataset.from_list(ROWS),
        datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
        {"train": ROWS},
    ],
    ids=["list", "Dataset", "DatasetDict", "mapping"],
)
def test_rows_of_any_kind_train_a_task(data: object, tmp_path: Path) -> None:
    tasks = {"t": {"dataset": data, "eval_dataset": ROWS[:2], "rewards": [shout], "constraints": [shout]}}
    for form in (tasks, {"tasks": tasks}, [{"name": "t", **tasks["t"]}]):
        config, loader = name_objects(RunConfig(output_dir=str(tmp_path)), form, None)
        assert json.loads(json.dumps(config.tasks))["t"]["rewards"] == [f"{shout.__module__}:shout"]
        assert loader is not None
        rows = {split: [dict(row) for row in rows] for split, rows in loader.splits["t"].items()}
        assert rows.pop("validation") == ROWS[:2]
        assert list(rows.values()) == [ROWS]


def test_rows_and_splits_that_cannot_be_used_are_refused() -> None:
    both = {"train": ROWS, "test": ROWS}
    with pytest.raises(ConfigError, match="it has splits train, test; give the rows of one"):
        name_objects(RunConfig(), {"t": {"dataset": ROWS, "eval_dataset": both, "rewards": ["f1"]}}, None)
    with pytest.raises(ConfigError, match="every task of a list is a mapping with a 'name'"):
        name_objects(RunConfig(), [{"rewards": ["f1"]}], None)
    talk = [[{"role": "user", "content": "hi"}]]
    with pytest.raises(DataError, match=r"\[0\]: expected .* conversation .* \{'prompt': \[\{'role'"):
        name_objects(RunConfig(), {"t": {"dataset": talk, "rewards": ["f1"]}}, None)
    with pytest.raises(DataError, match="no rows"):
        name_objects(RunConfig(), {"t": {"dataset": [], "rewards": ["f1"]}}, None)


class Indexed:
    """A data set of torch: rows by number, which can also be iterated over."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (pandas.DataFrame(ROWS), r"got DataFrame; give a list of its rows: .* data\.to_dict\('records'\)"),
        (pandas.Series(["a", "b"]), r"got Series; give .* list\(data\)"),
        (numpy.array(["a", "b"]), r"got ndarray; give .* list\(data\)"),
        ({"a", "b"}, r"got set; give .* list\(data\)"),
        (Indexed(), r"got Indexed; give .* list\(data\)"),
        ({"prompt": ["a"], "reference": ["b"]}, r"of columns .* datasets\.Dataset\.from_dict\(data\)"),
    ],
    ids=["DataFrame", "Series", "array", "set", "torch", "columns"],
)
def test_what_holds_rows_in_another_form_is_told_how_to_give_them(data: object, told: str) -> None:
    with pytest.raises(DataError, match=rf"tasks\.t\.dataset: .*{told}"):
        name_objects(RunConfig(), {"t": {"dataset": data, "rewards": ["f1"]}}, None)


@pytest.mark.parametrize("split", ["train[:4]", "train[:50%]+train[80%:]", "validation[:2]", "a+b"])
def test_a_slice_of_a_split_is_of_that_split(split: str) -> None:
    data = datasets.Dataset.from_list(ROWS, split=split)
    _, loader = name_objects(RunConfig(), {"t": {"dataset": data, "rewards": ["f1"]}}, None)
    assert loader is not None
    expected = {"a+b": ""}.get(split, split.partition("[")[0])
    assert list(loader.splits["t"]) == [expected]
