"""Shell completion: words come from the commands themselves; the shells that are installed are run."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli import COMMANDS, main
from multitask_rl.cli.completion import SHELLS, completions
from multitask_rl.cli.train import config_keys


@pytest.fixture(scope="module")
def words():
    return completions()


def test_a_shell_that_starts_waits_for_no_heavy_library():
    told = "import sys; from multitask_rl.cli.completion import completions; completions()"
    done = subprocess.run([sys.executable, "-c", f"{told}; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_every_command_and_key_is_there(words):
    assert {name.split()[0] for name in COMMANDS} <= set(words[""])
    assert {"--html", "--open"} <= set(words["report"])
    assert {"validate", "show", "schema"} <= set(words["tasks"])
    assert "--quick" in words["tasks validate"]
    assert {"reward", "tracker"} <= set(words["plugins new"])
    known = {word.partition("=")[0] for word in words["train"] if "=" in word}
    assert known == set(config_keys())
    assert {"executor=ray", "scheduler.policy=bandit", "guard.enabled=true"} <= set(words["train"])


CASES = [
    ("tr", "train"),
    ("train batch.gr", "batch.group_size="),
    ("train max_steps=3 executor=", "executor=local executor=ray"),
    ("tasks va", "validate"),
    ("plugins new re", "reward"),
    ("plugins check exact", "exact_match"),
    ("report --ht", "--html"),
    ("nothing x", ""),
    ("train +", "+experiment=first"),
    ("train --config-dir other +", "+experiment=second"),
    ("train tasks.", "tasks.math. tasks.code."),
    ("train tasks_file=list.yaml tasks.", "tasks.words."),
    ("train +experiment=first tasks.", "tasks.words."),
    ("train +experiment=gone tasks.", "tasks.math. tasks.code."),
    ("eval run tasks.", "tasks.stored."),
    ("train tasks.math.wei", "tasks.math.weight="),
    ("rescore run --task ", "stored"),
    ("rescore run --task=st", "--task=stored"),
    ("rescore run --tasks list.yaml --task w", "words"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the script of each shell, tasks, experiments and a run."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with (folder / shell).open("w") as file, contextlib.redirect_stdout(file):
            assert main(["completion", shell]) == 0
    files = {
        "tasks.yaml": "# tasks:\ntasks:\n  math: {type: grpo}\n  # no task:\n  code:\n    type: ppo\n",
        "list.yaml": 'tasks:\n  - name: "words"\n    rewards: [{name: none}]\n',
        "configs/experiment/first.yaml": "# @package _global_\ntasks_file: list.yaml\n",
        "other/experiment/second.yaml": "",
        "run/config.yaml": "tasks:\n  stored:\n    name: stored\n    rewards:\n    - name: none\nseed: 0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def told(folder: Path, shell: str, script: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    plain = {"zsh": ["-f"], "fish": ["--no-config"]}.get(shell, [])
    done = subprocess.run(
        [shell, *plain, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("line", "found"), CASES)
def test_bash_completes(folder, line, found):
    words = told(
        folder,
        "bash",
        f'source ./bash; COMP_LINE="multitask-rl {line}"; COMP_POINT=${{#COMP_LINE}}; _multitask_rl; '
        'echo "${COMPREPLY[*]}"',
    )
    value = line.rpartition(" ")[2].partition("=")  # bash completes what follows its last =
    assert words == [word.removeprefix("".join(value[:2]) if value[1] else "") for word in found.split()]


@pytest.mark.parametrize(("line", "found"), CASES)
def test_zsh_completes(folder, line, found):
    stubs = "compdef() { : }; _files() { : }; "
    stubs += "compadd() { while [[ $1 != -- ]]; do shift; done; shift; (( $# )) && print -rl -- $@ }; "
    given = " ".join(f"'{word}'" for word in f"multitask-rl {line}".split(" "))
    all_words = told(folder, "zsh", f"{stubs} source ./zsh; words=({given}); CURRENT=$#words; _multitask_rl")
    begun = line.rpartition(" ")[2]
    assert [word for word in all_words if word.startswith(begun)] == found.split()


@pytest.mark.parametrize(("line", "found"), [case for case in CASES if case[1]])
def test_fish_completes(folder, line, found):
    words = told(folder, "fish", f"source ./fish; complete -C 'multitask-rl {line}'")
    assert set(found.split()) <= set(words)


def test_fish_tells_subcommands_apart(folder):
    text = (folder / "fish").read_text()
    assert "__fish_seen_subcommand_from plugins ; and __fish_seen_subcommand_from new" in text
    assert text.count("batch.group_size=") == 4


def test_a_reader_that_has_had_enough_ends_a_command_without_a_word():
    command = "import sys; from multitask_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    script = f"'{sys.executable}' -c '{command}' completion fish | head -1; echo ended ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("ended 141", "ended 0"), "0: all was written at once"
    assert len(done.stdout.splitlines()) == 2
