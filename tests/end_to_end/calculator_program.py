"""An agent program as anybody writes one: ``python calculator_program.py CLIENT``.

It offers the model a calculator, and computes for it until there is an answer. ``openai`` is the
client library; ``http`` starts faster.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

SCHEMA: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def ask_by_http(chat: list[Any]) -> Any:
    """Return the message that answers a chat."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": chat, "tools": [SCHEMA]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def ask_by_openai(chat: list[Any]) -> Any:
    """Return the same by the client library."""
    from openai import OpenAI

    answer = OpenAI().chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=chat, tools=[SCHEMA]
    )
    return answer.choices[0].message.model_dump(exclude_none=True)


def compute(call: Any) -> str:
    """Return the result of a call as text."""
    try:
        expression = json.loads(call["function"]["arguments"])["expression"]
        if not set(expression) <= set("0123456789+-*() ") or "**" in expression:
            return "Error: not arithmetic"
        return str(eval(expression, {}))
    except Exception as error:
        return f"Error: {error!r}"


def main() -> None:
    """Hold the conversation of the row on standard input."""
    ask = ask_by_openai if sys.argv[1] == "openai" else ask_by_http
    chat: list[Any] = json.load(sys.stdin)["prompt"]
    while calls := (message := ask(chat)).get("tool_calls"):
        results = [(call["id"], compute(call)) for call in calls]
        chat.append(message)
        chat += [{"role": "tool", "tool_call_id": key, "content": text} for key, text in results]


if __name__ == "__main__":
    main()
