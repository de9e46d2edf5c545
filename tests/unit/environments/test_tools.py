"""Tool calls in answers, schemas of methods, and the world that makes the calls."""

import functools
import json
import random

import pytest

from cpu_time import is_linear
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.calls import read_calls
from multitask_rl.environments.tools import Tool, ToolWorld
from multitask_rl.environments.worker import WorldWorker
from multitask_rl.errors import DataError, PluginError, SandboxError


class Box:
    def __init__(self):
        self.items = []

    def reset(self, question, **row):
        return f" ({question})"

    def put(self, item: str, times: int = 1) -> str:
        """Put an item into the box.

        Args:
            item: What to put.
            times: How often.
        """
        if item == "bomb":
            raise RuntimeError("it exploded")
        self.items += [item] * times
        return f"{len(self.items)} items"

    def get_reward(self):
        return float(len(self.items))


def world():
    return ToolWorld(Box(), "tasks.a.environment", lambda function, *a, **k: function(*a, **k))


CALL = {"name": "put", "arguments": {"item": "key", "times": 2}}


@pytest.mark.parametrize(
    "text",
    [
        f"I put it.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        f"<tool_call>{json.dumps(CALL)}",
        "<tool_call>\n<function=put>\n<parameter=item>\nkey\n</parameter>\n<parameter=times>\n2\n</parameter>\n</function>",
        f"[TOOL_CALLS] {json.dumps([CALL])}",
        json.dumps({"name": "put", "parameters": {"item": "key", "times": 2}}),
        "<|python_tag|>" + json.dumps(CALL),
        json.dumps([CALL]),  # Mistral, whose mark is a special token
        "[TOOL_CALLS]put[ARGS]" + json.dumps(CALL["arguments"]),
        "put" + json.dumps(CALL["arguments"]),
        json.dumps(
            {"type": "function", "function": {"name": "put", "arguments": json.dumps(CALL["arguments"])}}
        ),
        "<think>\n<tool_call>{}</tool_call> perhaps\n</think>\n<tool_call>"
        + json.dumps(CALL)
        + "</tool_call>",
    ],
)
def test_every_known_form_of_a_call_is_made(text):
    box = world()
    box.reset({"question": "?"})
    result = box.step({"role": "assistant", "content": text})
    assert [m["content"] for m in result.messages] == ["2 items"]
    assert result.info == {"tool_calls": {"put": 1}}
    assert not result.done
    assert box.earned() == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "",
        '{"a": 1}',
        "a < b <tool> c",
        '{"name": "Ada", "born": 1815}',
        "[1, 2]",
        "f{x}",
        'The call {"name": "put", "arguments": {}} would work.',
        "<think>I may <tool_call>{}</tool_call>",
    ],
)
def test_an_answer_without_a_call_ends_the_episode(text):
    assert read_calls(text)[1] == []
    assert world().step({"role": "assistant", "content": text}).done


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"{call('a')}<think>hm</think>done", "a"),
        (f"{call('a')}<think>{call('b')}</think>{call('c')}", "ac"),
        (f"{call('a')}<think>hm {call('b')}", "a"),
        (f"<think>hm</think>{call('a')}<think>{call('b')}</think>done", "a"),
        (f"hm {call('a')}</think>{call('b')}", "b"),  # the prompt ended with <think>
        (f"the form <tool_call></think>{call('a')}", "a"),
        (f"<think>the form <tool_call></think>{call('a')}", "a"),
        ("<think>hm</think><function=a></function><think>hm</think>", "a"),
    ],
)
def test_a_thought_hides_the_calls_in_it_and_no_other(text, names):
    assert [one.name for one in read_calls(text)[1]] == [*names]


@pytest.mark.parametrize("thought", ["", "<think>hm</think>", f"hm {call('a')}</think>"])
@pytest.mark.parametrize("written", ["<think>", "</think>", "<think>hm</think>"])
def test_the_marks_of_a_thought_in_an_argument_belong_to_the_argument(written, thought):
    _, calls = read_calls(f"{thought}{call('write', text=written)}")
    assert calls[0].arguments == {"text": written}


def test_the_text_before_the_first_call_keeps_its_thoughts():
    assert read_calls(f"<think>hm</think>I call.{call('a')}")[0] == "<think>hm</think>I call."
    assert read_calls('<think>hm</think>\n{"name": "a", "arguments": {}}')[0] == "<think>hm</think>"


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("{not json}", "bad_json", "has to be a JSON object"),
        ('{"name": 3}', "bad_json", '{"name": text, "arguments": object}'),
        ('{"name": "put", "arguments": [1]}', "bad_json", "object"),
        ('{"name": "take", "arguments": {}}', "unknown_tool", "there are: put"),
        ('{"name": "put", "arguments": {}}', "bad_arguments", "item: Field required"),
        ('{"name": "put", "arguments": {"item": "a", "to": 1}}', "bad_arguments", "to: Extra inputs"),
        ('{"name": "put", "arguments": {"item": "a", "times": "x"}}', "bad_arguments", "valid integer"),
    ],
)
def test_a_wrong_call_is_told_to_the_actor_and_counted(body, kind, says):
    result = world().step({"role": "assistant", "content": f"<tool_call>{body}</tool_call>"})
    assert says in result.messages[0]["content"]
    assert result.info == {"wrong_calls": {kind: 1}}
    assert not result.done


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>%s\n%s</tool_call>",
        "<tool_call>%s</tool_call>\n<tool_call>%s</tool_call>",
        "%s; %s",
        "[%s, %s]",
        "[TOOL_CALLS][%s, %s] that is all",
    ],
)
def test_calls_of_one_answer_are_made_in_order(text):
    calls = [json.dumps({"name": "put", "arguments": {"item": item}}) for item in "ab"]
    box = world()
    said = box.step({"content": text % tuple(calls)}).messages
    assert [m["content"] for m in said] == ["1 items", "2 items"]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "put", "arguments": {"item": "a',
        '[{"name": "put", "parameters": {"item": "a"}',
        "[TOOL_CALLS]",
    ],
)
def test_a_call_that_is_cut_is_told(text):
    result = world().step({"content": text})
    assert result.info == {"wrong_calls": {"bad_json": 1}}


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=put>", "<function=", "</function>", "<parameter=item>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "put", "\\", '"'),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\n",
        " ",
        "9" * 5000,
        "1e999",
        "NaN",
        "null",
        "\ud800",
        "\0",
        "é",
        "\\u00",
    ),
    *(
        json.dumps(CALL),
        json.dumps([CALL, None, 3]),
        '{"name": 3}',
        '{"function": {}}',
        '{"arguments": "{}"}',
    ),
    *('{"name": "put", "arguments": ', '{"name": "put", "parameters": "[[', "[" * 20_000, '{"a":' * 20_000),
]


def test_no_text_breaks_the_world():
    chance = random.Random(1)
    box = world()
    seen = set()
    for _ in range(3000):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 8)))
        result = box.step(
            {"role": "assistant", "content": text[: chance.choice([None, None, len(text) // 2])]}
        )
        assert result.done != bool(result.messages)
        assert all(isinstance(message["content"], str) for message in result.messages)
        seen |= result.info.get("wrong_calls", {}).keys() | result.info.keys()
    assert seen == {"tool_calls", "wrong_calls", "bad_json", "unknown_tool", "bad_arguments"}


PIECES_OF_LONG_ANSWERS = (
    *("{}", "<tool_call>", "<think>", "[TOOL_CALLS]", "<function=a>", "[", "{", '{"a":', "a" * 64, " "),
    *("<think>a</think>", "</think>", "<tool_call></tool_call>"),
)


@pytest.mark.parametrize("piece", PIECES_OF_LONG_ANSWERS)
def test_the_time_to_read_an_answer_grows_with_its_length_and_not_with_the_square(piece):
    assert is_linear(lambda size: read_calls(piece * (size // len(piece))), 15_000)


def test_a_text_argument_between_tags_stays_text_and_others_are_read():
    class Notes:
        def reset(self):
            pass

        def note(self, text: str, also: str | None = None, pages: list[int] | None = None) -> str:
            """Note."""
            return repr((text, also, pages))

    call = "<function=note><parameter=text>\n12\n</parameter><parameter=also>{}</parameter>"
    call += "<parameter=pages>[1, 2]</parameter></function>"
    notes = ToolWorld(Notes(), "here", lambda function, *a, **k: function(*a, **k))
    assert notes.step({"content": call}).messages[0]["content"] == "('12', '{}', [1, 2])"


def test_arguments_may_have_any_name():
    class Names:
        def reset(self, self_, function):
            return function

        def look(self, function: str, schema: int, _x: bool, model_config: str = "") -> dict:
            """Look.

            Args:
                function (str): One.
                schema: Two,
                    on two lines.
            """
            return {"all": [function, schema, _x]}

    names = ToolWorld(Names(), "here", functools.partial(WorldWorker.run, None))
    opening = names.reset({"self_": 1, "function": "why"})
    assert opening.suffix == "why"
    properties = opening.tools[0]["function"]["parameters"]["properties"]
    assert list(properties) == ["function", "schema", "_x", "model_config"]
    assert properties["function"] == {"type": "string", "description": "One."}
    assert properties["schema"]["description"] == "Two, on two lines."
    call = {"name": "look", "arguments": {"function": "f", "schema": 1, "_x": True}}
    assert names.step({"content": json.dumps(call)}).messages[0]["content"] == '{"all": ["f", 1, true]}'


def test_a_row_without_a_column_that_reset_needs_is_bad_data():
    with pytest.raises(DataError, match=r"needs a row with .question., it has: other"):
        world().reset({"other": 1})
    with pytest.raises(DataError, match=r"needs a row with .question., it has: no column"):
        world().reset({})


def test_a_sandbox_that_fails_is_no_error_of_the_actor():
    class Broken(Box):
        def put(self, item: str) -> str:
            """Put."""
            raise SandboxError("gone") if item == "sandbox" else SystemExit(2)

    def call(item):
        return {"content": json.dumps({"name": "put", "arguments": {"item": item}})}

    broken = ToolWorld(Broken(), "here", lambda function, *a, **k: function(*a, **k))
    with pytest.raises(SandboxError):
        broken.step(call("sandbox"))
    assert broken.step(call("exit")).info["tool_errors"] == {"put": 1}


def test_calls_beyond_the_limit_are_refused_and_the_actor_may_answer():
    def call(item, **more):
        return f"<tool_call>{json.dumps({'name': 'put', 'arguments': {'item': item, **more}})}</tool_call>"

    spec = WorldSpec(reference=f"{__file__}:Box", max_tool_calls=2)
    box = spec.build(lambda function, *args, **kwargs: function(*args, **kwargs))
    box.reset({"question": "why"})
    first = box.step({"content": call("a") + call("b", times="no")})
    assert first.info == {"tool_calls": {"put": 1}, "wrong_calls": {"bad_arguments": 1}}, "it is not made"
    second = box.step({"content": call("b") + call("c")})
    assert [m["content"] for m in second.messages] == [
        "2 items",
        "Error: the limit of tool calls is reached; answer now, without a call",
    ]
    assert second.info == {"tool_calls": {"put": 1}, "wrong_calls": {"over_limit": 1}}
    third = box.step({"content": call("d")})
    assert not third.done
    assert third.info == {"wrong_calls": {"over_limit": 1}}
    wrong = box.step({"content": call("e").replace("put", "take") + call("e")[:-14]})
    assert wrong.info == {"wrong_calls": {"over_limit": 2}}, "of any further call, also one that is wrong"
    assert box.step({"content": "two"}).done
    assert box.earned() == 2.0


def test_a_tool_that_raises_tells_the_actor_its_error():
    text = '<tool_call>{"name": "put", "arguments": {"item": "bomb"}}</tool_call>'
    result = world().step({"role": "assistant", "content": text})
    assert result.messages[0]["content"] == "Error: RuntimeError: it exploded"
    assert result.info == {"tool_calls": {"put": 1}, "tool_errors": {"put": 1}}


def test_the_schema_is_that_of_chat_templates():
    opening = world().reset({"question": "why", "unused": 1})
    assert opening.suffix == " (why)"
    assert opening.tools == [
        {
            "type": "function",
            "function": {
                "name": "put",
                "description": "Put an item into the box.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "item": {"type": "string", "description": "What to put."},
                        "times": {"type": "integer", "default": 1, "description": "How often."},
                    },
                    "required": ["item"],
                },
            },
        }
    ]


def test_a_tool_without_docstring_or_types_is_refused():
    def bare(x: int):
        return x

    def untyped(x):
        """Do it."""

    with pytest.raises(PluginError, match=r"'bare' has no docstring.*begins its name with _"):
        Tool(bare, "tasks.a.environment")
    with pytest.raises(PluginError, match="the argument 'x' needs a name and a type"):
        Tool(untyped, "tasks.a.environment")
    with pytest.raises(PluginError, match="has no tool"):
        ToolWorld(object(), "here", print)
