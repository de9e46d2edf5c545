"""An agent with the ``openai`` client: the model may use a calculator, its last answer is graded.

pip install 'multitask-rl[agent]'; then, in this directory:
multitask-rl train tasks_file=tasks.yaml model.name_or_path=MODEL output_dir=runs/agent
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from openai import APIStatusError, OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "operator": {"type": "string", "enum": ["+", "-", "*"]},
        "b": {"type": "integer"},
    },
    "required": ["a", "operator", "b"],
}
CALCULATE = {
    "name": "calculate",
    "description": "Add, subtract or multiply two whole numbers.",
    "parameters": PARAMETERS,
}
TOOLS: list[Any] = [{"type": "function", "function": CALCULATE}]


def calculate(arguments: str) -> str:
    """Return the result of a call; what is wrong with it is told to the model, not raised."""
    try:
        given = json.loads(arguments)
        a, b = int(given["a"]), int(given["b"])
        return str({"+": a + b, "-": a - b, "*": a * b}[given["operator"]])
    except (ValueError, TypeError, KeyError) as error:
        return f"Error: {type(error).__name__}: {error}"


def last_number(answer: str) -> str:
    """Return the whole number at the end of an answer; signs may follow it (``**3,276**.``)."""
    found = re.search(r"(?<![\w.,])-?\d[\d,]*(?=(?:\.0*)?\W*$)", answer)
    return found[0].replace(",", "") if found else ""


def run(base_url: str, api_key: str, row: Mapping[str, Any], rounds: int = 3) -> dict[str, float]:
    """Let the model work on the row's question and return the rewards by name."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator. End with the number alone."},
        {"role": "user", "content": row["prompt"]},
    ]
    num_calls, answer = 0, ""
    for _ in range(rounds):
        try:
            completion = client.chat.completions.create(
                model="actor", messages=messages, tools=TOOLS, max_tokens=64
            )
        except APIStatusError as error:
            if error.status_code == 410:  # a limit of the task has ended the episode
                break
            raise
        message = completion.choices[0].message
        answer = message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        calls: list[Any] = list(message.tool_calls or [])
        if not calls:
            break
        for call in calls:
            num_calls += 1
            content = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"right": float(last_number(answer) == row["reference"]), "calls": -0.1 * num_calls}
