"""Constraints of mode ``grammar`` in the tasks file: what loads, and what each mistake is told."""

import json
import sys
from pathlib import Path

import pytest

from multitask_rl.config.grammar import lark_source
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.errors import ConfigError, MissingExtraError
from multitask_rl.records import SamplingParams

HEAD = "tasks:\n  m:\n    rewards: [math_answer]\n    constraints:\n"


def load(tmp_path: Path, *entries: str, head: str = HEAD):
    path = tmp_path / "tasks.yaml"
    path.write_text(head + "".join(f"      - {entry}\n" for entry in entries))
    return load_tasks(path)["m"]


@pytest.mark.parametrize(
    "config",
    [
        {"regex": "[0-9]{1,3}"},
        {"regex": "^(?i)yes|no$"},
        {"choices": ["yes", "no", "I don't know"]},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {
            "json_schema": {
                "$ref": "#/$defs/list",
                "$defs": {"list": {"type": "array", "items": {"$ref": "#"}}},
            }
        },
    ],
)
def test_a_grammar_is_part_of_how_the_task_is_sampled(tmp_path, config):
    spec = load(tmp_path, f"{{mode: grammar, config: {json.dumps(config)}}}")
    assert spec.constraints[0].name == "grammar"
    assert spec.judged == []
    sampling = spec.sampling_params(SamplingParams(max_new_tokens=7))
    assert sampling == SamplingParams(max_new_tokens=7, grammar=json.dumps(config))


def test_a_grammar_stands_beside_constraints_that_judge(tmp_path):
    spec = load(tmp_path, "fact_checker", "{mode: grammar, name: digits, config: {regex: '[0-9]+'}}")
    assert [c.name for c in spec.constraints] == ["fact_checker", "digits"]
    assert [c.name for c in spec.judged] == ["fact_checker"]


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("{regex: '['}", ["tasks.yaml:5", "constraints[0].config.regex", "unclosed character class"]),
        ("{regex: 'a(?=b)'}", ["look-around", "not supported"]),
        ("{regex: '(a)\\1'}", ["backreferences are not supported"]),
        ("{regex: '\\bword'}", ["not supported"]),
        ("{regex: 'a)|(b'}", ["unopened group"]),
        ("{regex: '[a&&b]'}", ["no text matches"]),
        ("{regex: ''}", ["expected a regular expression", "''"]),
        ("{regex: 7}", ["expected a regular expression", "7"]),
        ("{regx: a}", ["unknown key 'regx'", "did you mean 'regex'", "choices"]),
        ("{}", ["exactly one of regex, json_schema, choices", "none"]),
        ("{regex: a, choices: [a, b]}", ["exactly one", "regex, choices"]),
        ("{choices: [yes, no]}", ["config.choices[0]", "True", "quotes"]),
        ("{choices: [a]}", ["at least two"]),
        ("{choices: [a, '']}", ["choices[1]", "empty"]),
        ("{choices: [a, b, a]}", ["choices[2]", "'a' is there twice"]),
        ("{json_schema: {type: objct}}", ["config.json_schema", "Invalid type: objct"]),
        ("{json_schema: {not: {type: string}}}", ["Unimplemented keys", "not"]),
        ("{json_schema: {type: integer, minimum: 3, maximum: 1}}", ["Unsatisfiable"]),
        ("{json_schema: {const: 2020-01-01}}", ["the schema is no JSON", "quotes"]),
        ("{json_schema: [1]}", ["expected a JSON schema (a mapping)"]),
        ("{json_schema: {x-guidance: 1}}", ["x-guidance", "expected a mapping"]),
    ],
)
def test_each_mistake_is_told_before_anything_loads(tmp_path, config, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"{{mode: grammar, config: {config}}}")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        (["{mode: grammar, plugin: fact_checker, config: {regex: a}}"], ["no plugin", "'fact_checker'"]),
        (["{mode: grammar, limit: 0.1, config: {regex: a}}"], ["constraints[0].limit", "has no limit"]),
        (["{mode: grammar, stream_every: 8, config: {regex: a}}"], ["has no stream_every"]),
        (["{mode: reject}"], ["key 'plugin' is missing", "only mode grammar"]),
        (
            ["{mode: grammar, config: {regex: a}}", "{mode: grammar, name: b, config: {regex: b}}"],
            ["constraints[1]", "a task has one", "anyOf"],
        ),
    ],
)
def test_a_grammar_has_no_plugin_and_a_task_one_grammar(tmp_path, entries, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *entries)
    for part in parts:
        assert part in str(caught.value)


def test_a_grammar_alone_gives_nothing_to_learn(tmp_path):
    with pytest.raises(ConfigError, match="neither rewards nor constraints that judge"):
        load(tmp_path, "{mode: grammar, config: {regex: a}}", head="tasks:\n  m:\n    constraints:\n")


def test_the_sampling_section_has_no_key_for_it(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'grammar'"):
        load(
            tmp_path,
            "fact_checker",
            head=HEAD.replace("    constr", "    sampling: {grammar: a}\n    constr"),
        )


def test_without_the_library_the_file_is_refused_with_the_command_that_mends_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'multitask-rl\[grammar\]'"):
        load(tmp_path, "{mode: grammar, config: {regex: a}}")


def test_choices_are_taken_literally():
    from llguidance import LLMatcher

    choices = ["a.b", "x|y", "(", "a/b\n", "é\\", "#&~ -", "]"]
    assert LLMatcher.validate_grammar(lark_source(json.dumps({"choices": choices}))) == ""
