from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from multitask_rl.config.checks import check_entry_point
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError, MissingExtraError, PluginError
from multitask_rl.plugins import (
    GROUPS,
    REWARDS,
    absolute_reference,
    build_plugin,
    list_plugins,
    load_plugin,
    source_file,
)


def install(
    folder: Path,
    distribution: str,
    entries: dict[str, str],
    module: str = "",
    text: str = "",
    group: str = REWARDS,
) -> None:
    """Write what a wheel leaves in site-packages."""
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    if module:
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_listing_imports_no_plugin_and_nothing_heavy() -> None:
    code = (
        "import sys; from multitask_rl.plugins import list_plugins; assert list_plugins(); "
        "bad = {'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'multitask_rl_rewards'} "
        "& set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_bundled_plugin_is_listed_with_its_distribution() -> None:
    infos = list_plugins(REWARDS)
    assert {i.name for i in infos} >= {"exact_match", "math_answer", "code_evaluator", "rm_hf"}
    assert all(i.distribution == "multitask-rl" and i.version for i in infos)
    assert {i.group for i in list_plugins()} <= set(GROUPS)


def test_unknown_group_names_the_groups() -> None:
    with pytest.raises(PluginError, match=r"unknown plugin group 'rewards'; groups: multitask_rl\.tasks"):
        list_plugins("rewards")


def test_unknown_name_offers_close_ones_and_explains_reinstalling() -> None:
    with pytest.raises(PluginError) as caught:
        load_plugin(REWARDS, "exact_macth")
    text = str(caught.value)
    assert text.startswith("unknown reward 'exact_macth'. Did you mean 'exact_match'")
    assert "Installed in group multitask_rl.rewards: " in text
    assert text.endswith("is seen only after its distribution is installed again (pip install -e .).")


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("multitask_rl.reward", "which is no group of plugins; use multitask_rl.rewards)"),
        ("multitask_rl.schedulers", "declares it in group multitask_rl.schedulers)"),
    ],
)
def test_a_plugin_in_a_wrong_group_is_told_with_its_distribution(site: Path, group: str, told: str) -> None:
    install(site, "lost-dist", {"lost": "lost_plugin:f"}, group=group)
    with pytest.raises(PluginError, match=r"lost-dist 1\.2 declares it in group ") as caught:
        load_plugin(REWARDS, "lost")
    with pytest.raises(ConfigError) as in_a_file:
        check_entry_point(Where(), REWARDS, "lost")
    assert told in str(caught.value)
    assert told in str(in_a_file.value)
    assert {info.group for info in list_plugins()} <= set(GROUPS)


def test_two_distributions_with_one_name_are_both_named(site: Path) -> None:
    install(site, "first-dist", {"twice": "first:A"})
    install(site, "second-dist", {"twice": "second:B"})
    with pytest.raises(PluginError) as caught:
        load_plugin(REWARDS, "twice")
    assert str(caught.value) == (
        "reward 'twice' is declared by 2 distributions: first-dist 1.2 (first:A); second-dist 1.2 "
        "(second:B). Uninstall one, or name the object directly as 'module:object' instead of 'twice'."
    )


def test_one_distribution_found_twice_is_one(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site / "a", "same_dist", {"once": "once_plugin:f"}, "once_plugin", "f = len\n")
    install(site / "b", "Same.Dist", {"once": "once_plugin:f"})
    monkeypatch.syspath_prepend(str(site / "b"))
    monkeypatch.syspath_prepend(str(site / "a"))
    assert load_plugin(REWARDS, "once") is len


def test_broken_import_names_everything(site: Path) -> None:
    install(site, "broken-dist", {"broken": "broken_plugin:f"}, "broken_plugin", "import no_such_library\n")
    with pytest.raises(PluginError) as caught:
        load_plugin(REWARDS, "broken")
    assert str(caught.value) == (
        "reward 'broken' of broken-dist 1.2 cannot be loaded: importing 'broken_plugin:f' (group "
        "multitask_rl.rewards) failed with ModuleNotFoundError: No module named 'no_such_library'; "
        "install that package beside multitask-rl, or correct the import"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_missing_extra_keeps_its_own_words(site: Path) -> None:
    text = (
        "from multitask_rl.errors import MissingExtraError\nraise MissingExtraError(\"pip install 'x[y]'\")\n"
    )
    install(site, "extra-dist", {"extra": "extra_plugin:f"}, "extra_plugin", text)
    with pytest.raises(MissingExtraError, match=r"^pip install 'x\[y\]'$"):
        load_plugin(REWARDS, "extra")


def test_wrong_shape_is_said(site: Path) -> None:
    install(site, "shape-dist", {"shape": "shape_plugin:Shape"}, "shape_plugin", "class Shape: ...\n")
    with pytest.raises(PluginError, match=r"has no 'score' and no 'traits': it does not fit the contract"):
        load_plugin(REWARDS, "shape", expects=("score", "traits"))


class Typed:
    @dataclass(kw_only=True)
    class Config:
        timeout: float = 1.0
        name: str = "x"

        def __post_init__(self) -> None:
            if self.timeout <= 0:
                raise ValueError("timeout must be > 0")

    def __init__(self, config: Typed.Config) -> None:
        if config.name == "boom":
            raise RuntimeError("no such model")
        self.config = config


class Plain:
    pass


class Untyped:
    def __init__(self, config):
        self.config = config


def test_a_class_that_wants_a_config_and_declares_none_is_told_to() -> None:
    with pytest.raises(PluginError, match=r"'config'\. A class without a nested dataclass 'Config' is built"):
        build_plugin(Untyped, {}, where="tasks.a.rewards[0].config")


def test_config_is_typed_by_the_plugin() -> None:
    plugin = build_plugin(Typed, {"timeout": 3}, where="here")
    assert plugin.config == Typed.Config(timeout=3.0)
    assert isinstance(plugin.config.timeout, float)
    assert isinstance(build_plugin(Plain, {}, where="here"), Plain)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"timeuot": 1},
            r"tasks\.t\.config.*unknown key 'timeuot'; did you mean 'timeout'\? \(allowed: name, timeout\)",
        ),
        ({"timeout": "soon"}, r"tasks\.t\.config.*expected a number, got 'soon'"),
        ({"timeout": -1}, r"tasks\.t\.config.*timeout must be > 0"),
    ],
)
def test_wrong_config_says_where_and_what(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plugin(Typed, config, where="tasks.t.config")


def test_keys_for_a_plugin_without_config_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"here: .*Plain takes no configuration, got 'a'\. Remove the keys"):
        build_plugin(Plain, {"a": 1}, where="here")


def test_constructor_that_raises_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match=r"here: .*Typed could not be built: RuntimeError: no such model"):
        build_plugin(Typed, {"name": "boom"}, where="here")


@pytest.mark.parametrize("entered", ["multitask_rl.executor.group", "multitask_rl.training.backends.replica"])
def test_what_a_plugin_file_defines_is_found_by_learner_ranks_and_ray_actors(
    tmp_path: Path, entered: str
) -> None:
    (tmp_path / "beside.py").write_text("BASE = int\n")
    (tmp_path / "kinds.py").write_text("from beside import BASE\n\n\nclass Own(BASE):\n    pass\n")
    own = load_plugin(REWARDS, f"{tmp_path}/kinds.py:Own")
    code = (
        f"import sys, pickle, {entered}; value = pickle.load(sys.stdin.buffer); "
        "assert (type(value).__name__, value) == ('Own', 7), value"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(own(7)), check=True, timeout=60)


@pytest.mark.parametrize("directory", ["run:1", "10:20:30", "plain"])
def test_a_directory_may_have_colons_in_its_name(tmp_path: Path, directory: str) -> None:
    file = tmp_path / directory / "own.py"
    for prefix in ("", "verl:"):
        reference = f"{prefix}{file}:Mine"
        assert absolute_reference(reference) == reference
        assert source_file(reference) == file


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_plugin_is_told_by_its_kind(group):
    kind = re.sub(r"(?<=box)es$|s$", "", group.rpartition(".")[2]).replace("_", " ")
    with pytest.raises(PluginError, match=rf"unknown {kind} 'nosuch'"):
        load_plugin(group, "nosuch")


def test_a_file_edited_within_a_second_to_the_same_size_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = []
    for number in (1, 2):
        (tmp_path / "own.py").write_text(f"def score(response):\n    return {number}.0\n")
        os.utime(tmp_path / "own.py", (1e9, 1e9))
        found.append(load_plugin(REWARDS, f"{tmp_path}/own.py:score")("a"))
    assert found == [1.0, 2.0]
