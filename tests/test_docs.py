"""The pages: all are in the site's navigation, and every link leads to a file and a heading that exist."""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from forked import run_forked
from multitask_rl.cli import COMMANDS, main
from multitask_rl.cli.train import compose_and_run
from multitask_rl.config.run import RunConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.guard.decision import GuardAction

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("examples/**/*.ipynb"),
    ]
)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site name them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .*: (\S+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_examples_of_task_types_are_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "task-types.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for name in set(re.findall(r"\w+\.jsonl", page)):
        (tmp_path / name).touch()
    (tmp_path / "models" / "writer").mkdir(parents=True)
    types = {
        spec.type for block in blocks for spec in parse_tasks(yaml.safe_load(block), "the page").values()
    }
    assert {"grpo", "ppo", "reward_conditioned", "constrained_decoding", "sft", "distill", "anchor"} == types


def _texts() -> list[str]:
    """Return every text in the code of the packages; parts that are computed are left out."""
    found = list[str]()
    for package in ("multitask_rl", "tasks", "rewards"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                    found.append("".join(map(str, parts)))
    return found


def test_messages_on_the_page_of_errors_are_messages_of_the_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 20
    texts = _texts()
    assert [message for message in messages if not any(message in text for text in texts)] == []


def test_the_page_of_events_has_every_kind() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    made = {("guard", action.value) for action in GuardAction if action is not GuardAction.keep}
    for path in (ROOT / "multitask_rl").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        made |= set(re.findall(r'Event\([^()]*source="(\w+)", kind="(\w+)"', text))
        made |= {("scheduler", kind) for kind in re.findall(r'\b_event\("(\w+)"', text)}
    assert len(made) > 12
    assert sorted(made - told) == []


def test_recipes_are_tasks_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^    multitask-rl train ((?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert (len(blocks), len(commands)) > (8, 6)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in set(re.findall(r"\w+\.jsonl", page)):
        (tmp_path / name).touch()
    for run in ("code", "prose"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    for block in blocks:
        assert parse_tasks(yaml.safe_load(block), "the page")
    (tmp_path / "tasks.yaml").write_text(blocks[-1])
    for command in commands:
        if "--multirun" not in command:
            seen = list[RunConfig]()
            assert compose_and_run(shlex.split(command.replace("\\\n", " ")), "train", seen.append) == 0
            assert seen[0].model.name_or_path == "MODEL"


def test_the_cost_model_of_scale_is_what_its_script_prints_and_what_was_measured(capsys) -> None:
    model = runpy.run_path(str(ROOT / "docs" / "simulate_scale.py"))
    model["main"]()
    table = capsys.readouterr().out.split("\n\n")[1]
    assert table in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "traffic.json").read_text())["rows"]
    for row in rows:
        names = ("parameters", "samples", "learned", "tokens", "adapters", "adapted")
        shape = {name: row[name] for name in names if name in row}
        run = model["Run"](**shape, weight_bytes=4, stored=row["samples"], **{row["of"]: row["number"]})
        assert model["traffic"](run)[row["line"]] == pytest.approx(row["bytes"], rel=0.15, abs=1)


COMMAND = re.compile(r"^    multitask-rl ((?:.*\\\n)*.*)$", re.MULTILINE)
RUN_OF_A_PAGE = ["tasks_file=tasks.yaml", "model.name_or_path=MODEL"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run's files and a task of each name that the pages use."""
    folder = tmp_path_factory.mktemp("project")
    assert main(["init", str(folder), "--model", "MODEL", "--yes"]) == 0
    shutil.copytree(ROOT / "configs", folder / "configs", dirs_exist_ok=True)
    for name in ("tasks", "all"):
        task = {"dataset": "data/sums.jsonl", "rewards": ["rewards.py:right_number"]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"tasks": {"math": task, "code": task}}))
    return folder


@cache
def help_of(command: str) -> str:
    """Return what a command prints for ``--help``."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return told.getvalue()


@cache
def composes(*words: str) -> bool:
    """Whether the words of ``multitask-rl train`` make the configuration of a run."""
    seen = list[RunConfig]()
    assert compose_and_run(list(words), "train", seen.append) == 0
    return bool(seen[0].output_dir)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.suffix == ".md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_of_a_page_are_commands(page: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exists with the options that it is given; the configuration of each run is one."""
    monkeypatch.chdir(project)
    for command in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        name = "sandbox corpus" if words[:2] == ["sandbox", "corpus"] else words[0]
        assert name in COMMANDS, command
        options = [word for word in words if word.startswith("--")]
        if name == "train" and "--multirun" not in options:
            words = [part for word in words[1:] for part in (RUN_OF_A_PAGE if word == "..." else [word])]
            assert composes(*words), command
            continue
        assert [option for option in options if option not in help_of(name)] == [], command


OURS = r"python ((?:benchmarks|docs|examples)/"
SCRIPT = re.compile(rf"(?:^ *{OURS}.*)|`{OURS}[^`]*)`)", re.MULTILINE)
PARSE = """
import argparse, json, os, runpy, sys

class Parsed(BaseException):
    pass

def parse_only(self, *given, parse=argparse.ArgumentParser.parse_args, **named):
    parse(self, *given, **named)
    raise Parsed

argparse.ArgumentParser.parse_args = parse_only
for command in json.loads(sys.argv[1]):
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
        print(command, "asked for no arguments")
    except Parsed:
        pass
    except BaseException as error:
        print(command, repr(error))
"""


def test_scripts_of_the_pages_take_the_arguments_given(tmp_path: Path) -> None:
    """Each exists; its parser gets what a page gives it, and nothing after that is done."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.suffix == ".md"]
    found = {"".join(parts) for text in texts for parts in SCRIPT.findall(text)}
    parsed = list[list[str]]()
    for command in sorted(found):
        script, *arguments = shlex.split(command, comments=True)
        source = (ROOT / script).read_text(encoding="utf-8")
        if "parse_args" in source:
            parsed.append([script, *arguments])
        else:
            assert "sys.argv" in source or not arguments, command
    assert len(parsed) > 35
    (tmp_path / "parse.py").write_text(PARSE)
    done = run_forked(tmp_path / "parse.py", json.dumps(parsed), cwd=ROOT)
    assert done.stdout == "", done.stderr


def test_the_first_page_has_tasks_and_a_reward_that_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (tasks,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "rewards.py").write_text(source)
    (tmp_path / "data").mkdir()
    for name in re.findall(r"data/\w+\.jsonl", tasks):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert set(parse_tasks(yaml.safe_load(tasks), "the page")) == {"math", "json"}
    score = runpy.run_path("rewards.py")["fields_right"]
    fields = {"name": "Ann", "age": 4}
    answers = ('{"name": "Ann", "age": 5}', json.dumps(fields), "5", "[]", "{")
    assert [score(answer, fields) for answer in answers] == [0.5, 1.0, 0.0, 0.0, 0.0]


def test_the_readme_and_the_page_of_the_scheduler_have_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/math.jsonl", "data/chats.jsonl", "math.jsonl"):
        (tmp_path / name).touch()
    for page in (ROOT / "README.md", ROOT / "docs" / "scheduler-and-guard.md"):
        blocks = re.findall(r"^```yaml\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        assert blocks
        for block in blocks:
            assert "math" in parse_tasks(yaml.safe_load(block), "the page")
