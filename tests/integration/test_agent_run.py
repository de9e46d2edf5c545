"""A run whose task is an agent of the user's own: its requests are recorded as turns with tokens."""

from __future__ import annotations

import json

from run_builders import TASKS, run_config, train, write_run

AGENT = """
import http.client
import json
import urllib.parse
import urllib.request


def ask(base_url, key, messages):
    data = json.dumps({"messages": messages, "model": "any"}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    return choice["message"]


def chunks(base_url, key, messages, **settings):
    address = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    body = json.dumps({"messages": messages, "stream": True, **settings})
    connection.request("POST", f"{address.path}/chat/completions", body)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
    connection.close()


def limited(base_url, key, row):
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": row["prompt"]}]
    *parts, last, usage = chunks(
        base_url, key, messages, max_tokens=2, stop=["a"], stream_options={"include_usage": True}
    )
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert "a" not in text and len(text) <= 2
    is_cut = last["choices"][0]["finish_reason"] == "length"
    return {"tokens": usage["usage"]["completion_tokens"], "cut": is_cut}


def run(base_url, key, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for reply in ("ab", "ba"):
        messages += [ask(base_url, key, messages), {"role": "user", "content": reply}]
    last = ask(base_url, key, messages)["content"]
    other = ask(base_url, key, [{"role": "user", "content": "b"}])["content"]  # another conversation
    return {"last": float(last[:1] == "a"), "other": float(other[:1] == "b")}
"""

TASK = """
  agent:
    type: grpo
    dataset: digit.jsonl
    environment: agent:agents.py:run
    max_turns: 5
  limited:
    type: grpo
    dataset: digit.jsonl
    environment: agent:agents.py:limited
    max_turns: 5
"""


def test_requests_of_an_agent_are_trained_on(tmp_path):
    (tmp_path / "agents.py").write_text(AGENT)
    write_run(tmp_path, TASKS + TASK)
    trainer = train(run_config(tmp_path, "out", 2))
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    for row in (row for row in rows if row["task"] == "limited"):
        assert row["failure"] is None
        assert row["earned"]["tokens"] == len(row["response_ids"]) <= 2
        assert row["earned"]["cut"] == (row["finish_reason"] == "length")
    reasons = {row["finish_reason"] for row in rows if row["task"] == "limited"}
    assert reasons == {"stop", "length"}
    rows = [row for row in rows if row["task"] == "agent"]
    assert rows
    for row in rows:
        assert [turn["messages"][-1]["content"] for turn in row["turns"][1:]] == ["ab", "ba", "b"]
        assert sum(turn["num_tokens"] for turn in row["turns"]) == len(row["response_ids"])
        assert row["reward"] in (0.0, 1.0, 2.0)
        assert row["turns"][3]["context_ids"], "the fourth request begins the conversation anew"
    tokenizer = trainer.actor.tokenizer
    given = rows[0]["turns"][1]["given_ids"]
    assert tokenizer.decode(given, skip_special_tokens=True) == "ab"  # the vocabulary has no line break
