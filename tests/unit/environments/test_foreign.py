"""Environments of other libraries: fixtures of their shape, and the real packages where installed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from multitask_rl.environments import foreign
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.foreign import FOREIGN
from multitask_rl.errors import ConfigError, DataError, MissingExtraError, PluginError
from multitask_rl.plugins import build_plugin
from multitask_rl.scoring.foreign import build_foreign

FIXTURES = Path(__file__).parents[2] / "fixtures" / "foreign_environments"
WHERE = "tasks.t.environment"


def build(reference: str, **config):
    return build_plugin(build_foreign(FOREIGN, reference, WHERE).value, config, where=f"{WHERE}_config")


def say(world, text: str):
    return world.step({"role": "assistant", "content": text})


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_prefix_without_a_target_says_what_is_expected():
    with pytest.raises(PluginError, match="expected 'openenv:http"):
        build_foreign(FOREIGN, "openenv:", WHERE)


@pytest.mark.parametrize(
    "reference", ["openenv:http://localhost:1", "verifiers:x", "reasoning_gym:chain_sum"]
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, reference):
    for name in ("openenv", "verifiers.v1", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"{WHERE}.*pip install"):
        build(reference)


class FakeWorld:
    """An environment of OpenEnv that counts its sessions."""

    action: ClassVar[dict]
    closed: ClassVar[list] = []

    def __init__(self) -> None:
        self.steps = 0

    def state(self):
        return {"step_count": self.steps}


class Words(FakeWorld):
    action: ClassVar[dict] = {
        "properties": {"word": {"type": "string"}, "metadata": {}},
        "required": ["word"],
    }

    def reset(self, seed=0):
        return {"text": f"seed {seed}", "metadata": {}}, None, False

    def step(self, action):
        self.steps += 1
        return {"text": action["word"].upper()}, 0.5, self.steps == 2


class Moves(FakeWorld):
    """An action of two fields, so the actor calls ``act``."""

    action: ClassVar[dict] = {
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
    }

    def reset(self):
        return {"board": [0, 0], "metadata": {"hidden": 1}}, None, False

    def step(self, action):
        if set(action) != {"x", "y"}:
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.steps += 1
        return {"board": [action["x"], action["y"]]}, 1.0, action["x"] == 9


class Tools(FakeWorld):
    """A server of tools (MCP)."""

    action: ClassVar[dict] = {"title": "CallToolAction", "properties": {"tool_name": {"type": "string"}}}

    def reset(self):
        return {"metadata": {}}, None, False

    def step(self, action):
        if action["type"] == "list_tools":
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            return (
                {"tools": [{"name": "double", "description": "Twice.", "input_schema": schema}]},
                None,
                False,
            )
        if not isinstance(action["arguments"].get("a"), int):
            return {"result": None, "error": {"error_type": "invalid_args", "message": "a?"}}, None, False
        if action["arguments"]["a"] < 0:
            return {"result": None, "error": {"error_type": "execution_error", "message": "< 0"}}, None, False
        text = {"type": "text", "text": str(2 * action["arguments"]["a"])}
        return {"result": {"content": [text]}, "error": None}, 0.25, False


@pytest.fixture
def served(monkeypatch) -> Iterator[object]:
    """A function that serves an environment through the fake client and returns its reference."""
    monkeypatch.syspath_prepend(str(FIXTURES / "fakes"))
    monkeypatch.delitem(sys.modules, "openenv", raising=False)
    import openenv

    with contextlib.ExitStack() as stack:

        def serve(kind) -> str:
            class Handler(BaseHTTPRequestHandler):
                def log_message(self, *args: object) -> None: ...

                def do_GET(self) -> None:
                    data = json.dumps({"action": kind.action}).encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            address = f"http://127.0.0.1:{server.server_port}"
            openenv.ENVIRONMENTS[address] = kind
            return f"openenv:{address}"

        yield serve
    sys.modules.pop("openenv")
    FakeWorld.closed.clear()


def test_the_text_of_the_actor_is_the_only_field_of_the_action(served):
    world = build(served(Words))
    opening = world.reset({"seed": 7, "prompt": "?"})
    assert [m["content"] for m in opening.messages] == ["seed 7"]
    assert opening.tools == []
    first = say(world, " abc ")
    assert ([m["content"] for m in first.messages], first.reward, first.done) == (["ABC"], 0.5, False)
    last = say(world, "d")
    assert (last.reward, last.done, last.info) == (0.5, True, {"state": {"step_count": 2}})
    world.close()
    assert FakeWorld.closed == [True]


def test_an_action_of_several_fields_is_a_tool(served):
    world = build(served(Moves), observation="board.1")
    opening = world.reset({})
    assert opening.tools[0]["function"]["name"] == "act"
    assert opening.tools[0]["function"]["parameters"]["required"] == ["x", "y"]
    result = say(world, call("act", x=1, y=5))
    assert ([m["content"] for m in result.messages], result.reward) == (["5"], 1.0)
    wrong = say(world, call("act", x=1))
    assert "no valid arguments" in wrong.messages[0]["content"]
    assert (wrong.done, wrong.reward, wrong.info["wrong_calls"]) == (False, None, {"bad_arguments": 1})
    both = say(world, call("act", x=9, y=1) + call("act", x=1, y=1))
    assert (both.done, both.reward, both.info["tool_calls"]) == (True, 1.0, {"act": 1})
    world.close()


def test_tools_of_a_server_are_called_and_an_answer_without_a_call_ends_the_episode(served):
    world = build(served(Tools))
    opening = world.reset({})
    assert opening.messages == []
    assert opening.tools[0]["function"]["name"] == "double"
    result = say(
        world, call("double", a=4) + call("triple") + call("double") + call("double", a=-1) + "<tool_call>"
    )
    assert [m["content"].partition(":")[0] for m in result.messages] == ["8", *["Error"] * 4]
    assert all(m["role"] == "tool" for m in result.messages)
    assert result.reward == 0.25
    assert result.info == {
        "tool_calls": {"double": 2},
        "wrong_calls": {"unknown_tool": 1, "bad_arguments": 1, "bad_json": 1},
        "tool_errors": {"double": 1},
    }
    assert say(world, "It is 8.").done
    world.close()


def test_a_server_of_this_machine_is_played_past_a_proxy(served, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    world = build(served(Words))
    assert world.reset({"seed": 5}).messages[0]["content"] == "seed 5"
    world.close()


def test_a_directory_without_a_manifest_is_refused(served, tmp_path):
    with pytest.raises(PluginError, match=r"no directory with openenv\.yaml"):
        build(f"openenv:{tmp_path}")


def test_a_server_of_openenv_is_started_and_played():
    pytest.importorskip("openenv", reason="needs the package openenv")
    world = build(f"openenv:{FIXTURES / 'counter_server'}")
    assert world.reset({"seed": 5}).messages[0]["content"] == "seed 5"
    assert [say(world, word).messages[0]["content"] for word in "ab"] == ["1: a", "2: b"]
    last = say(world, "c")
    assert (last.done, last.reward, last.info["state"]["step_count"]) == (True, 0.5, 3)
    world.close()


def test_an_environment_of_verifiers_asks_the_actor(monkeypatch):
    pytest.importorskip("verifiers.v1", reason="needs the package verifiers (>= 0.4)")
    monkeypatch.syspath_prepend(str(FIXTURES))
    world = build("verifiers:guess_taskset")
    opening = world.reset({"idx": 2})
    assert opening.is_whole
    assert [m["content"] for m in opening.messages] == ["Guess number 2"]
    again = say(world, "1")
    assert ([m["content"] for m in again.messages], again.anew) == (["wrong, again"], None)
    assert say(world, "2").done
    assert world.earned() == {"solved": 1.0}
    world.close()
    with pytest.raises(PluginError, match="which of the agents"):
        build("verifiers:guess_taskset", role="judge")
    world = build("verifiers:guess_taskset")
    with pytest.raises(DataError, match="no task"):
        world.reset({"idx": 77})
    world.close()


@pytest.fixture
def fake_verifiers(monkeypatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FIXTURES / "fakes"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(foreign, "_verifiers", {})
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        del sys.modules[name]


@pytest.mark.usefixtures("fake_verifiers")
class TestVerifiers:
    @pytest.mark.parametrize("row", [{"idx": 2}, {"idx": "task-2"}, {"prompt": "Guess 2"}])
    def test_programs_of_the_library_ask_the_actor(self, row):
        world = build("verifiers:guess")
        opening = world.reset(row)
        assert (opening.is_whole, [m["content"] for m in opening.messages]) == (True, ["Guess 2"])
        assert [m["content"] for m in say(world, "1").messages] == ["no"]
        assert say(world, "2").done
        assert world.earned() == {"solved": 2.0}
        world.close()

    def test_episodes_of_one_environment_run_at_once(self):
        worlds = [build("verifiers:guess") for _ in range(3)]
        for number, world in enumerate(worlds):
            world.reset({"idx": number})
        assert len(foreign._verifiers) == 1
        for number, world in enumerate(worlds):
            assert say(world, str(number)).done
            assert world.earned() == {"solved": 2.0}
            world.close()

    def test_an_endless_taskset_is_read_as_far_as_needed(self):
        world = build("verifiers:guess", env={"taskset": {"bounded": False}})
        assert world.reset({"idx": 7}).messages[0]["content"] == "Guess 7"
        world.close()
        world = build("verifiers:guess", env={"taskset": {"bounded": False}})
        with pytest.raises(DataError, match="endless taskset"):
            world.reset({"prompt": "Guess 7"})
        world.close()

    def test_a_limit_leaves_what_was_earned_until_then(self):
        for answers, earned in ((["1"], {"solved": 0.0}), ([], None)):
            world = build("verifiers:guess")
            world.reset({"idx": 2})
            for answer in answers:
                say(world, answer)
            assert world.earned() == earned
            world.close()

    def test_an_error_of_the_library_is_a_failure(self):
        world = build("verifiers:guess")
        world.reset({"idx": 2})
        with pytest.raises(RuntimeError, match="EnvError: the game broke"):
            say(world, "break")
        world.close()

    def test_the_agent_that_the_actor_plays_has_to_be_clear(self):
        with pytest.raises(PluginError, match=r"which of the agents \['player', 'user'\]"):
            build("verifiers:guess", env={"id": "user-sim"})
        world = build("verifiers:guess", env={"id": "user-sim", "user": {"client": {}}})
        world.reset({"idx": 0})
        assert say(world, "0").done
        assert world.earned() == {"solved": 2.0}
        world.close()
        with pytest.raises(PluginError, match="cannot be loaded: ModuleNotFoundError"):
            build("verifiers:other")
        world = build("verifiers:guess")
        with pytest.raises(DataError, match="no task for the row"):
            world.reset({"idx": 9})
        world.close()


def questions(size: int = 2):
    library = pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    return list(library.create_dataset("chain_sum", size=size, seed=1))


def test_a_question_is_answered_until_it_is_solved():
    entry = questions()[0]
    world = build("reasoning_gym:chain_sum", tries=2, feedback="only {score:.1f}")
    row = {"answer": entry["answer"], "metadata": {}, "metadata_literal": repr(entry["metadata"])}
    assert world.reset(row).messages == ()
    result = say(world, "<answer>no</answer>")
    assert (result.done, [m["content"] for m in result.messages]) == (False, ["only 0.0"])
    result = say(world, f"No: <answer>{entry['answer']}</answer>")
    assert (result.done, result.info) == (True, {"tries": 2})
    assert world.earned() == 1.0


def test_the_last_of_the_tries_is_what_counts():
    questions()
    world = build("reasoning_gym:chain_sum", tries=1)
    world.reset(questions()[0])
    assert say(world, "nothing").done
    assert world.earned() < 1.0
    world = build("reasoning_gym:chain_sum")
    world.reset(questions()[0])
    assert world.earned() is None


def test_an_answer_that_the_verifier_cannot_read_scores_0():
    library = pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    world = build("reasoning_gym:prime_factorization", tries=1)
    world.reset(dict(library.create_dataset("prime_factorization", size=1, seed=3)[0]))
    assert world.step({"role": "assistant", "content": "two times three"}).done
    assert world.earned() == 0.0


def test_settings_and_rows_of_reasoning_gym_are_checked():
    questions()
    with pytest.raises(PluginError, match="unknown reasoning-gym data set 'no_such'"):
        build("reasoning_gym:no_such")
    with pytest.raises(ConfigError, match=r"environment_config.*dataset.*max_term.*did you mean 'max_terms'"):
        build("reasoning_gym:chain_sum", dataset={"max_term": 3})
    parts = [{"name": "leg_counting", "weight": 1.0, "config": {}}]
    build("reasoning_gym:composite", dataset={"datasets": parts})
    with pytest.raises(ConfigError, match="tries"):
        build("reasoning_gym:chain_sum", tries=0)
    with pytest.raises(DataError, match="no metadata"):
        build("reasoning_gym:chain_sum").reset({"answer": "1"})


ROW = {"prompt": "Pay.", "start": 1, "goal": 5}


def trl(name: str, **config):
    file = FIXTURES / "trl_environments.py"
    if "reward_function" in config:
        config["reward_function"] = f"{file}:{config['reward_function']}"
    spec = WorldSpec(reference=f"trl:{file}:{name}", config=config, where=WHERE)
    return spec.build(lambda function, *args, **kwargs: finished(function(*args, **kwargs)))


def finished(value):
    async def wait():
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def pay(world, amount: int) -> str:
    return say(world, call("deposit", amount=amount)).messages[0]["content"]


@pytest.mark.parametrize("name", ["Account", "make_account"])
def test_an_environment_of_trl_runs_as_it_is(name):
    world = trl(name)
    opening = world.reset(ROW)
    assert opening.suffix == " Balance: 1."
    function = opening.tools[0]["function"]
    assert (function["name"], function["description"]) == ("deposit", "Pay money into the account.")
    assert function["parameters"]["properties"]["amount"]["description"] == "The amount, in euros."
    assert pay(world, 4) == "Balance: 5"
    assert ("too much" in pay(world, 6)) == (name == "make_account")
    assert say(world, "Done.").done
    assert world.earned() is None
    world.close()


@pytest.mark.parametrize(
    ("name", "function", "earned"),
    [
        ("Account", "reached", 1.0),
        ("Account", "polite", 1.0),
        ("Scored", "", 2.5),
        ("Scored", "reached", {"Scored": 2.5, "reached": 1.0}),
    ],
)
def test_the_reward_is_that_of_the_environment_and_of_a_function_that_reads_it(name, function, earned):
    world = trl(name, **({"reward_function": function} if function else {}))
    world.reset(ROW)
    pay(world, 4)
    say(world, "Done.")
    assert world.earned() == earned
    world.close()


def test_a_reward_function_of_trl_may_leave_an_episode_unscored():
    world = trl("Account", reward_function="polite", limit=3)
    world.reset(ROW)
    assert say(world, "Done.").done
    assert world.earned() is None


def test_mistakes_in_an_environment_of_trl_are_told():
    with pytest.raises(PluginError, match="environment_config"):
        trl("Account", bound=3)
    with pytest.raises(PluginError, match="has no 'nothing'"):
        trl("Account", reward_function="nothing")
    with pytest.raises(PluginError, match="make_account"):
        trl("make_account", bound=3)
