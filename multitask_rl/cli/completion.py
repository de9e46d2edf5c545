"""Print a script that completes commands, options, keys, experiments and names of tasks in a shell.

    source <(multitask-rl completion bash)      # zsh: the same; fish: multitask-rl completion fish | source

Put the line into the shell's start file; in zsh, ``autoload -U compinit && compinit`` comes before it.
Commands and options come from the help of each command, keys from the configuration. Experiments are those of
``--config-dir`` (else ``configs``); tasks are those of the tasks file, experiment or run on the line, else of
``tasks.yaml``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.cli import COMMANDS, run_command
from multitask_rl.config.editor_schemas import run_schema, tasks_schema
from multitask_rl.plugins import GUARDS, ROLLOUT_ENGINES, SCHEDULERS, TRAINING_BACKENDS, list_plugins
from multitask_rl.testing.scaffold import KINDS

SHELLS = ("bash", "zsh", "fish")
SECOND = {
    "tasks": ("validate", "show", "schema"),
    "plugins": ("list", "check", "new"),
    "plugins new": tuple(KINDS),
    "sandbox": ("corpus",),
    "completion": SHELLS,
}
"""Words -> the words that may follow."""
WITH_KEYS = ("train", "eval", "bench", "doctor")
"""Commands that take keys of the configuration."""
_NAMES = {
    "scheduler.policy": SCHEDULERS,
    "guard.plugin": GUARDS,
    "rollout.engine": ROLLOUT_ENGINES,
    "training.backend": TRAINING_BACKENDS,
}

_FROM_FILES = r"""
begun=$1; shift
folder=configs; files=; before=
for word; do
    case "$before" in --config-dir | -cd) folder=$word ;; esac
    case "$word" in
    --config-dir=*) folder=${word#*=} ;;
    tasks_file=*) files="$files ${word#*=}" ;;
    +*=*)
        word=${word#+}
        word=$(sed -n "s/^tasks_file: *//p" "$folder/${word%%=*}/${word#*=}.yaml" 2>/dev/null)
        files="$files${word:+ $word}" ;;
    *.yaml) files="$files $word" ;;
    *) [ -f "$word/config.yaml" ] && files="$files $word/config.yaml" ;;
    esac
    before=$word
done
tasks() {
    for file in ${files:-tasks.yaml}; do
        sed -n "/^tasks:/,/^[^ #-]/{
            s/^ \{0,2\}- *name: *[\"']\{0,1\}\([A-Za-z0-9_.-]*\).*/\1/p
            s/^  \([A-Za-z0-9_.-]*\):.*/\1/p
        }" "$file" 2>/dev/null
    done
}
case "$1: $before $begun" in
rescore:*\ --task=*) for task in $(tasks); do echo "--task=$task"; done ;;
rescore:\ --task\ *) tasks ;;
COMMANDS)
    case "$begun" in
    +*) for file in "$folder"/*/*.yaml; do
        [ -f "$file" ] && file=${file#"$folder/"} && file=${file%.yaml} && echo "+${file%/*}=${file#*/}"
    done ;;
    tasks.*.*) for task in $(tasks); do for key in KEYS; do echo "tasks.$task.$key="; done; done ;;
    tasks.*) for task in $(tasks); do echo "tasks.$task."; done ;;
    esac ;;
esac
"""
"""Shell: what only the files at hand know, for the word begun and the words before it."""

_WORDS = """\
_multitask_rl_from_files=FILES
_multitask_rl_words() {
    local found="$(sh -c "$_multitask_rl_from_files" sh "$@")"
    [ -n "$found" ] && echo "$found" && return
    shift
    case "$1 $2" in
PAIRS
    *) case "$1" in
SINGLE
        "") echo "FIRST" ;;
        esac ;;
    esac
}
"""

_BASH = """\
_multitask_rl() {
    local line="${COMP_LINE:0:COMP_POINT}" cur words before
    cur="${line##* }"
    before="${line% *}"
    before="${before#*multitask-rl}"
    words="$(_multitask_rl_words "$cur" $before)"
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    [[ "$cur" == *=* && "$COMP_WORDBREAKS" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${cur%%=*}="}")
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _multitask_rl multitask-rl
"""

_ZSH = """\
_multitask_rl() {
    local found=(${=$(_multitask_rl_words "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}")})
    found=(${(M)found:#${(b)words[CURRENT]}*})
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
    (( $#found )) || _files
}
compdef _multitask_rl multitask-rl
"""


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell."""
    parser = argparse.ArgumentParser(
        prog="multitask-rl completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(arguments).shell
    words = completions()
    if shell == "fish":
        print(_fish(words))
        return 0
    pairs = {before: own for before, own in words.items() if " " in before}
    single = {before: own for before, own in words.items() if before and before not in pairs}
    script = _WORDS.replace("PAIRS", _cases(pairs, 4)).replace("SINGLE", _cases(single, 8))
    script = script.replace("FIRST", " ".join(words[""])).replace("FILES", shlex.quote(_from_files()))
    print(script + (_ZSH if shell == "zsh" else _BASH), end="")
    return 0


def _from_files() -> str:
    """Return the shell code of ``_FROM_FILES`` with today's commands and keys."""
    (mapped, _) = tasks_schema()["properties"]["tasks"]["anyOf"]
    commands = " | ".join(f"{name}:*" for name in WITH_KEYS)
    keys = " ".join(mapped["additionalProperties"]["properties"])
    return _FROM_FILES.replace("COMMANDS", commands).replace("KEYS", keys)


def completions() -> dict[str, list[str]]:
    """Return what may follow, by the words before it: "" (commands), ``train``, ``tasks validate``, ..."""
    names = [name for name in COMMANDS if " " not in name]
    words: dict[str, list[str]] = {"": [*names, "sandbox", "--help", "--version", "--debug"]}
    for name in names:
        words[name] = [*SECOND.get(name, ()), *_options(name)]
    for name, following in SECOND.items():
        for second in following if name in ("tasks", "plugins") else ():
            words[f"{name} {second}"] = [*SECOND.get(f"{name} {second}", ()), *_options(f"{name} {second}")]
    words["plugins check"] += sorted({info.name for info in list_plugins()})
    words["sandbox"] = ["corpus"]
    words["sandbox corpus"] = _options("sandbox corpus")
    keys = _keys()
    for name in WITH_KEYS:
        words[name] += keys
    return words


def _options(command: str) -> list[str]:
    """Return the long options that the help of ``command`` names."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        run_command([*command.split(), "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told.getvalue())) | {"--help"})


def _keys() -> list[str]:
    """Return every key as ``key=``, and ``key=value`` where the values are few."""
    found = list[str]()

    def collect(schema: Mapping[str, Any], prefix: str) -> None:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and prefix not in ("tasks.",):
            for name, own in properties.items():
                if not prefix and name in ("defaults", "hydra"):
                    continue
                collect(own, f"{prefix}{name}.")
            return
        key = prefix.removesuffix(".")
        kind: Any = (schema.get("anyOf") or [schema])[0]  # a reference is allowed beside it
        choices = ["true", "false"] if kind.get("type") == "boolean" else kind.get("enum", [])
        if key in _NAMES:
            choices = [info.name for info in list_plugins(_NAMES[key])]
        found.extend(f"{key}={choice}" for choice in [c for c in choices if c] or [""])

    collect(run_schema(), "")
    return found


def _cases(words: Mapping[str, Sequence[str]], indent: int) -> str:
    return "\n".join(f'{" " * indent}"{before}") echo "{" ".join(own)}" ;;' for before, own in words.items())


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = ["complete -c multitask-rl -n __fish_use_subcommand -f -a '" + " ".join(words[""]) + "'"]
    for before, own in words.items():
        if not before:
            continue
        seen = " ".join(f"; and __fish_seen_subcommand_from {word}" for word in before.split())
        lines.append(f"complete -c multitask-rl -n '{seen[6:]}' -a '{' '.join(own)}'")
    code = _from_files().replace("\\", "\\\\").replace("'", "\\'")
    lines += [
        "function _multitask_rl_from_files",
        "    set -l words (commandline -opc)",
        "    set -l begun (commandline -ct)",
        f"    sh -c '{code}' sh \"$begun\" $words[2..-1]",
        "end",
        "complete -c multitask-rl -a '(_multitask_rl_from_files)'",
    ]
    return "\n".join(lines)
