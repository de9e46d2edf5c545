"""An agent of the user's own: its requests to the address of its episode are the turns."""

from __future__ import annotations

import json
import runpy
import textwrap
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.environments.endpoint import Agent, RefusedError
from multitask_rl.environments.foreign import FOREIGN
from multitask_rl.errors import PluginError
from multitask_rl.plugins import build_plugin
from multitask_rl.scoring.foreign import build_foreign


def post(url: str, key: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    """Ask as a client does; the bytes of a stream, the object otherwise."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **(headers or {})}
    request = urllib.request.Request(f"{url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.read() if body.get("stream") else json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise RefusedError(error.code, json.load(error)["error"]["message"]) from None


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def world(tmp_path, source: str, **config: Any) -> Agent:
    """An episode of the agent ``run`` in ``source``."""
    file = tmp_path / "agent.py"
    head = "import json\nfrom test_endpoint import message, post\n"
    file.write_text(head + textwrap.dedent(source))
    return build(f"{file}:run", **config)


def build(target: str, **config: Any) -> Agent:
    kind = build_foreign(FOREIGN, f"agent:{target}", "environment").value
    agent: Agent = build_plugin(kind, config, where="environment_config")
    return agent


def say(world: Agent, text: str, **more: Any):
    return world.step({"role": "assistant", "content": text, **more})


def test_requests_of_an_agent_are_turns_and_its_result_is_the_reward(tmp_path):
    episode = world(
        tmp_path,
        """
        def run(base_url, api_key, row, bonus=0):
            history = [message("system", "Add."), message("user", row["question"])]
            answer = post(base_url, api_key, model="any", messages=history)["choices"][0]["message"]
            history += [answer, message("user", "Sure?")]
            last = post(base_url, api_key, messages=history)["choices"][0]["message"]["content"]
            return {"right": float(last == row["answer"]), "bonus": bonus}
        """,
        arguments={"bonus": 2.0},
    )
    opening = episode.reset({"question": "1+1?", "answer": "2"})
    assert opening.is_whole
    assert opening.messages == [message("system", "Add."), message("user", "1+1?")]
    result = say(episode, "3")
    assert (result.messages, result.done, result.anew) == ([message("user", "Sure?")], False, None)
    assert say(episode, "2").done
    assert episode.earned() == {"right": 1.0, "bonus": 2.0}
    episode.close()


def test_an_async_agent_runs_in_a_loop_of_its_own(tmp_path):
    episode = world(
        tmp_path,
        """
        import asyncio
        async def run(base_url, api_key, row):
            ask = asyncio.to_thread(post, base_url, api_key, messages=[message("user", "?")])
            return float(len((await ask)["choices"][0]["message"]["content"]))
        """,
    )
    episode.reset({})
    assert say(episode, "four").done
    assert episode.earned() == 4.0
    episode.close()


def test_a_request_with_another_history_begins_the_conversation_anew(tmp_path):
    episode = world(
        tmp_path,
        """
        def run(base_url, api_key, row):
            post(base_url, api_key, messages=[message("user", "plan")])
            post(base_url, api_key, messages=[message("user", "work"), message("assistant", "?")])
        """,
    )
    episode.reset({})
    result = say(episode, "a plan")
    assert (result.messages, result.done) == ((), False)
    assert result.anew.messages == [message("user", "work"), message("assistant", "?")]
    assert result.anew.is_whole
    assert say(episode, "done").done
    assert episode.earned() is None
    episode.close()


def test_requests_that_arrive_together_are_answered_one_after_the_other(tmp_path):
    episode = world(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor
        def run(base_url, api_key, row):
            def ask(name):
                text = post(base_url, api_key, messages=[message("user", name)])
                return text["choices"][0]["message"]["content"] == name.upper()
            with ThreadPoolExecutor(3) as pool:
                return float(sum(pool.map(ask, "abc")))
        """,
    )
    asked = episode.reset({}).messages[-1]["content"]
    for _ in range(2):
        asked = say(episode, asked.upper()).anew.messages[-1]["content"]
    assert say(episode, asked.upper()).done
    assert episode.earned() == 3.0
    episode.close()


def test_calls_of_tools_are_read_from_the_text_and_come_back_as_results(tmp_path):
    episode = world(
        tmp_path,
        """
        TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        def run(base_url, api_key, row):
            history = [message("user", "1+1?")]
            choice = post(base_url, api_key, messages=history, tools=TOOLS)["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            call = choice["message"]["tool_calls"][0]
            total = sum(json.loads(call["function"]["arguments"]).values())
            call["function"]["arguments"] = '{ "b":1, "a":1 }'  # a framework may write them in its own way
            history += [choice["message"], message("tool", str(total)) | {"tool_call_id": call["id"]}]
            last = post(base_url, api_key, messages=history, tools=TOOLS)["choices"][0]
            return float(last["finish_reason"] == "stop")
        """,
    )
    assert episode.reset({}).tools[0]["function"]["name"] == "add"
    text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    result = say(episode, text)
    assert [(m["role"], m["content"]) for m in result.messages] == [("tool", "2")]
    assert result.info["tool_calls"] == {"add": 1}
    assert say(episode, "2").done
    assert episode.earned() == 1.0
    episode.close()


def test_a_stream_holds_the_answer_its_calls_and_its_end(tmp_path):
    episode = world(
        tmp_path,
        """
        def run(base_url, api_key, row):
            data = post(base_url, api_key, messages=[message("user", "?")], stream=True,
                        tools=[{"type": "function", "function": {"name": "f"}}],
                        stream_options={"include_usage": True}).decode()
            lines = [line.removeprefix("data: ") for line in data.split("\\n\\n") if line]
            assert lines[-1] == "[DONE]"
            *chunks, last, usage = map(json.loads, lines[:-1])
            assert last["choices"][0]["finish_reason"] == "tool_calls"
            assert usage["choices"] == [] and "total_tokens" in usage["usage"]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(d.get("content") or "" for d in deltas) == "Now."
            assert deltas[-1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
            return 1.0
        """,
    )
    episode.reset({})
    assert say(episode, 'Now. <tool_call>{"name": "f", "arguments": {}}</tool_call>').done
    assert episode.earned() == 1.0
    episode.close()


def test_the_agent_is_told_that_an_answer_was_cut(tmp_path):
    episode = world(
        tmp_path,
        """
        def run(base_url, api_key, row):
            choice = post(base_url, api_key, messages=[message("user", "?")])["choices"][0]
            return float(choice["finish_reason"] == "length")
        """,
    )
    episode.reset({})
    assert say(episode, "half an ans", finish_reason="length").done
    assert episode.earned() == 1.0
    episode.close()


def test_limits_of_a_request_reach_the_actor_and_the_numbers_of_tokens_the_agent(tmp_path):
    episode = world(
        tmp_path,
        """
        def run(base_url, api_key, row):
            history = [message("developer", "Be brief."), message("user", "?")]
            limits = {"max_tokens": 9, "max_completion_tokens": 5, "stop": "END"}
            first = post(base_url, api_key, messages=history, **limits)
            history += [first["choices"][0]["message"], message("user", "?")]
            post(base_url, api_key, messages=history, stop=["A", "B"])
            post(base_url, api_key, messages=history[:1], max_tokens=3)
            return float(first["usage"]["total_tokens"])
        """,
    )
    opening = episode.reset({})
    assert opening.messages[0] == message("system", "Be brief.")
    assert (opening.max_tokens, opening.stop) == (5, ["END"])
    result = say(episode, "fine", usage={"prompt_tokens": 7, "completion_tokens": 2})
    assert (result.max_tokens, result.stop) == (0, ["A", "B"])
    result = say(episode, "fine")
    assert result.anew is not None
    assert (result.anew.max_tokens, result.anew.stop) == (3, [])
    say(episode, "fine")
    assert episode.earned() == 9.0
    episode.close()


def test_a_request_that_the_client_repeats_is_one_turn(tmp_path):
    episode = world(
        tmp_path,
        """
        import threading
        def run(base_url, api_key, row):
            def ask(n):
                headers = {"x-stainless-retry-count": n}
                return post(base_url, api_key, headers, messages=[message("user", "?")])
            lost = threading.Thread(target=ask, args=("0",))
            lost.start()
            row["asked"].wait(10)
            again = [ask(n)["choices"][0]["message"]["content"] for n in "12"]
            lost.join()
            return float(again == ["4", "4"])
        """,
    )
    row = {"asked": threading.Event()}
    episode.reset(row)
    row["asked"].set()
    assert say(episode, "4").done
    assert episode.earned() == 1.0
    episode.close()


def test_calls_of_tools_that_the_request_has_not_are_no_names_of_metrics(tmp_path):
    episode = world(
        tmp_path,
        """
        TOOLS = [{"type": "function", "function": {"name": "add"}}]
        def run(base_url, api_key, row):
            calls = post(base_url, api_key, messages=[message("user", "?")], tools=TOOLS)
            return float(len(calls["choices"][0]["message"]["tool_calls"]))
        """,
    )
    episode.reset({})
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    result = say(episode, call % "add" + call % "invented")
    assert result.info == {"tool_calls": {"add": 1}, "wrong_calls": {"unknown_tool": 1}}
    assert episode.earned() == 2.0
    episode.close()


def test_a_limit_ends_the_agent_which_still_gives_what_it_earned(tmp_path):
    source = """
    from test_endpoint import RefusedError
    def run(base_url, api_key, row):
        history = [message("user", "?")]
        for turn in range(10):
            try:
                answer = post(base_url, api_key, messages=history)["choices"][0]["message"]
            except RefusedError as error:
                if not row["catches"]:
                    raise
                assert error.status == 410
                break
            history += [answer, message("user", "?")]
        return float(turn)
    """
    for catches, earned in ((True, 2.0), (False, None)):
        episode = world(tmp_path, source)
        episode.reset({"catches": catches})
        say(episode, "1")
        say(episode, "2")
        assert episode.earned() == earned
        episode.close()


def test_an_agent_that_fails_is_a_failure_of_the_episode(tmp_path):
    episode = world(tmp_path, "def run(base_url, api_key, row):\n    raise OSError('no disk')")
    with pytest.raises(OSError, match="no disk"):
        episode.reset({})
    episode.close()
    episode = world(tmp_path, "def run(base_url, api_key, row):\n    return 1.0")
    with pytest.raises(RuntimeError, match="without a request"):
        episode.reset({})
    episode.close()


def test_close_frees_an_agent_and_a_step_that_wait(tmp_path):
    source = """
    import threading
    def run(base_url, api_key, row):
        post(base_url, api_key, messages=[message("user", "?")])
        row["asked"].set()
        row["free"].wait(10)
    """
    episode = world(tmp_path, source)
    row = {"asked": threading.Event(), "free": threading.Event()}
    episode.reset(row)
    stepping = threading.Thread(target=say, args=(episode, "1"))
    stepping.start()
    row["asked"].wait(5)
    closing = threading.Thread(target=episode.close)
    closing.start()
    stepping.join(5)
    assert not stepping.is_alive()
    assert closing.is_alive(), "it waits for the program: one that never ends costs its worker"
    row["free"].set()
    closing.join(5)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("body", "key", "status", "says"),
    [
        ({"messages": [{"role": "user", "content": "?"}]}, "wrong", 401, "no open episode"),
        ({"messages": []}, "", 400, "at least one message"),
        ({"messages": [{"role": "user", "content": "?"}], "n": 2}, "", 400, "n=1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", 400, "has to be text"),
        ({"messages": ["?"]}, "", 400, "'role'"),
        ({"messages": [{"role": "stranger", "content": "?"}]}, "", 400, "'role' of system, developer"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "", 400, "'tool_calls' has to be"),
        ({"messages": [{"role": "user", "content": "?"}], "tools": ["f"]}, "", 400, "'tools' has to be"),
        ({"messages": [{"role": "user", "content": "?"}], "functions": [{}]}, "", 400, "give 'tools'"),
        ({"messages": [{"role": "user", "content": "?"}], "max_tokens": 0}, "", 400, "'max_tokens' and"),
        ({"messages": [{"role": "user", "content": "?"}], "stop": [""]}, "", 400, "'stop' has to be"),
        (
            {
                "messages": [{"role": "user", "content": "?"}],
                "chat_template_kwargs": {"enable_thinking": False},
            },
            "",
            400,
            "set it in the tasks file",
        ),
        ({"messages": [{"role": "user", "content": "?"}], "stream_options": 1}, "", 400, "'stream_options'"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(tmp_path, body, key, status, says):
    episode = world(
        tmp_path,
        """
        from test_endpoint import RefusedError
        def run(base_url, api_key, row):
            address = base_url.replace(api_key + "/", "")
            try:
                post(address, row["key"] or api_key, **row["body"])
            except RefusedError as error:
                row["got"] = error.status, str(error)
            post(base_url, api_key, messages=[message("user", "?")])
        """,
    )
    row: dict[str, Any] = {"body": body, "key": key}
    episode.reset(row)
    assert row["got"][0] == status
    assert says in row["got"][1]
    episode.close()


def test_a_function_that_cannot_be_called_is_refused_before_the_run(tmp_path):
    with pytest.raises(PluginError, match="it is a class"):
        world(tmp_path, "class run:\n    def __init__(self, base_url, api_key, row): ...")
    with pytest.raises(PluginError, match=r"^environment: .*no function run"):
        world(tmp_path, "def run(row):\n    return 1.0")
    with pytest.raises(PluginError, match=r"^environment: .*has no 'run'; did you mean 'runs'"):
        world(tmp_path, "def runs(base_url, api_key, row):\n    return 1.0")
    with pytest.raises(PluginError, match=r"^environment_config: arguments: .*unexpected keyword.*'x'"):
        world(tmp_path, "def run(base_url, api_key, row):\n    return 1.0", arguments={"x": 1})


def test_the_example_uses_a_tool_and_is_graded():
    pytest.importorskip("openai", reason="needs the package openai")
    file = Path(__file__).parents[3] / "examples" / "agent" / "agent.py"
    episode = build(f"{file}:run")
    opening = episode.reset({"prompt": "2*3=", "reference": "6"})
    assert (opening.tools[0]["function"]["name"], opening.max_tokens) == ("calculate", 64)
    calls = ['{"a": 2, "operator": "*", "b": 3}', '{"a": 2}']
    text = "".join(f'<tool_call>{{"name": "calculate", "arguments": {own}}}</tool_call>' for own in calls)
    assert [m["content"] for m in say(episode, text).messages] == ["6", "Error: KeyError: 'b'"]
    assert say(episode, "It is 6").done
    assert episode.earned() == {"right": 1.0, "calls": -0.2}
    episode.close()


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("122", "122"),
        ("122.", "122"),
        ("**122**", "122"),
        ("The answer is 122.", "122"),
        ("59+63=122", "122"),
        ("43-75=-32", "-32"),
        ("3,276", "3276"),
        ("$122$", "122"),
        ("122.0", "122"),
        ("x = \\boxed{-32}", "-32"),
        ("12.5", ""),
        ("122 or more", ""),
        ("", ""),
    ],
)
def test_the_example_reads_the_number_at_the_end(answer, number):
    pytest.importorskip("openai", reason="needs the package openai")
    file = Path(__file__).parents[3] / "examples" / "agent" / "agent.py"
    assert runpy.run_path(str(file))["last_number"](answer) == number
