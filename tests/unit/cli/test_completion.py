"""Shell completion: words come from the commands themselves; bash is run, the other scripts name them."""

import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli import COMMANDS, main
from multitask_rl.cli.completion import completions
from multitask_rl.cli.train import config_keys


@pytest.fixture(scope="module")
def words():
    return completions()


def test_every_command_and_key_is_there(words):
    assert {name.split()[0] for name in COMMANDS} <= set(words[""])
    assert {"--html", "--open"} <= set(words["report"])
    assert {"validate", "show", "schema"} <= set(words["tasks"])
    assert "--quick" in words["tasks validate"]
    assert {"reward", "tracker"} <= set(words["plugins new"])
    known = {word.partition("=")[0] for word in words["train"] if "=" in word}
    assert known == set(config_keys())
    assert {"executor=ray", "scheduler.policy=bandit", "guard.enabled=true"} <= set(words["train"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tr", "train"),
        ("train batch.gr", "batch.group_size="),
        ("train max_steps=3 executor=", "local ray"),
        ("tasks va", "validate"),
        ("plugins new re", "reward"),
        ("plugins check exact", "exact_match"),
        ("report --ht", "--html"),
        ("nothing x", ""),
    ],
)
def test_bash_completes(tmp_path: Path, capsys, line, found):
    script = tmp_path / "completion.bash"
    if not SCRIPT:
        assert main(["completion", "bash"]) == 0
        SCRIPT.append(capsys.readouterr().out)
    script.write_text(SCRIPT[0])
    told = subprocess.run(
        [
            "bash",
            "-c",
            f'source {script}; COMP_LINE="multitask-rl {line}"; COMP_POINT=${{#COMP_LINE}}; '
            '_multitask_rl; echo "${COMPREPLY[*]}"',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == found


SCRIPT: list[str] = []


def test_zsh_and_fish_have_scripts_of_the_same_words(capsys):
    main(["completion", "zsh"])
    assert "bashcompinit" in capsys.readouterr().out
    main(["completion", "fish"])
    told = capsys.readouterr().out
    assert "__fish_seen_subcommand_from plugins ; and __fish_seen_subcommand_from new" in told
    assert told.count("batch.group_size=") == 4


def test_a_reader_that_has_had_enough_ends_a_command_without_a_word():
    command = "import sys; from multitask_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    script = f"'{sys.executable}' -c '{command}' completion fish | head -1; echo ended ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("ended 141", "ended 0"), "0: all was written at once"
    assert len(done.stdout.splitlines()) == 2
