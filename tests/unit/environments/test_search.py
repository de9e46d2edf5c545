"""Search: BM25 over the documents of a file, read once a process; every example question can be answered."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from multitask_rl.errors import ConfigError, MissingExtraError, PluginError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin

pytest.importorskip("bm25s")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "search"
PLACE = "multitask_rl_tasks.environments.search:Search"
DOCUMENTS = [
    {"title": "Tarsk", "text": "Tarsk is a town on the river Olm. Ina Vell founded Tarsk."},
    {"title": "Ina Vell", "text": "Ina Vell was a sailor, born in Brodo."},
    {"title": "Brodo", "text": "Brodo lies on the Lune. " + "It has many streets. " * 60},
    {"title": "Zenith", "text": "A hill."},
    {"title": "", "text": "Les cafés de Tarsk sont fermés."},
]


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(path: Path, **config):
    world = build_plugin(load_plugin(TASKS, PLACE), {"documents": str(path), **config}, where="test")
    assert world.reset(prompt="Who?", reference="Ina Vell") is None
    return world


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write(tmp_path / "documents.jsonl", DOCUMENTS)


def test_the_best_documents_come_first_with_title_and_text(documents):
    found = build(documents).search("Who founded Tarsk?")
    assert found.startswith("[1] Tarsk\nTarsk is a town on the river Olm. Ina Vell founded Tarsk.\n\n[2]")
    assert (
        build(documents, results=1).search("born sailor")
        == "[1] Ina Vell\nIna Vell was a sailor, born in Brodo."
    )


def test_titles_are_searched_too_and_other_letters_are_letters(documents):
    assert build(documents, results=1).search("ZENITH") == "[1] Zenith\nA hill."
    assert build(documents).search("fermés") == "[1]\nLes cafés de Tarsk sont fermés."


@pytest.mark.parametrize("query", ["", "   ", "the of", "zzz", "\ud800", "?" * 10_000])
def test_a_query_without_a_hit_says_so(documents, query):
    assert build(documents).search(query) == "No document has any of these words."


def test_long_documents_are_cut(documents):
    found = build(documents, results=1, max_chars=40).search("Lune")
    assert found == "[1] Brodo\nBrodo lies on the Lune. It has many stre..."


def test_the_file_is_read_once_for_many_episodes_and_again_when_it_has_changed(
    documents, tmp_path, monkeypatch
):
    from multitask_rl_tasks.environments import search

    worlds, reads = [], []
    real = search.read_file
    monkeypatch.setattr(search, "read_file", lambda path: (reads.append(path), real(path))[1])
    threads = [threading.Thread(target=lambda: worlds.append(build(documents))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worlds) == 8
    assert len(reads) == 1
    write(documents, [{"title": "New", "text": "A new document on Tarsk."}])
    assert build(documents).search("Tarsk").startswith("[1] New")
    assert worlds[0].search("Tarsk").startswith("[1] Tarsk")


def test_columns_have_names(tmp_path):
    path = write(
        tmp_path / "d.jsonl", [{"body": "About the sea.", "head": "Sea"}, {"body": "About hills.", "head": 3}]
    )
    assert build(path, text="body", title="head").search("hills") == "[1] 3\nAbout hills."
    with pytest.raises(PluginError, match=r"row 1 of .* has no text in `text`; its columns: body, head"):
        build(path)


def test_bad_settings_are_refused_when_the_world_is_built(tmp_path):
    with pytest.raises(ConfigError, match="`documents`"):
        build_plugin(load_plugin(TASKS, PLACE), {}, where="test")
    with pytest.raises(PluginError, match="does not exist"):
        build(tmp_path / "none.jsonl")
    with pytest.raises(PluginError, match="has no rows"):
        build(write(tmp_path / "empty.jsonl", []))


def test_a_missing_library_names_the_extra(documents, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtraError, match=r"multitask-rl\[search\]"):
        build_plugin(load_plugin(TASKS, PLACE), {"documents": str(documents)}, where="test")


def test_two_searches_find_the_answer_of_every_example_question():
    world = build(EXAMPLES / "documents.jsonl")
    rows = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"train", "test"}
    missed = []
    for row in rows:
        first = world.search(row["prompt"])
        names = re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?", first)
        second = [world.search(name) for name in dict.fromkeys(names)]
        if not any(row["reference"] in found for found in [first, *second]):
            missed.append(row["prompt"])
        assert row["reference"] not in row["prompt"]
    assert missed == []
