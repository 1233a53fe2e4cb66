"""The game of ``openenv_game.py`` without that package: ``python openenv_server.py PORT``.

Its path may name a fault: ``http://127.0.0.1:PORT/garbage``.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

FIELD = {"number": {"type": "integer"}, "metadata": {"type": "object"}}
SCHEMA = {"action": {"properties": FIELD, "required": ["number"]}}


def observation(hint: str, *, reward: float | None = None, done: bool = False) -> object:
    return {
        "type": "observation",
        "data": {"observation": {"metadata": {}, "hint": hint}, "reward": reward, "done": done},
    }


def failure(code: str, message: str, **fields: object) -> object:
    return {"type": "error", "data": {"code": code, "message": message, **fields}}


FAULTS = {
    "garbage": "no JSON",
    "list": "[1]",
    "undone": json.dumps({"type": "observation", "data": {"observation": {}}}),
    "nan": json.dumps(observation("x", reward=float("nan"))),
    "raises": json.dumps(failure("EXECUTION_ERROR", "the game is broken")),
}


def answer(action: dict[str, object], number: int) -> object:
    if not isinstance(action.get("number"), str | int):
        wrong = [{"loc": ["number"], "msg": "Field required"}]
        return failure("VALIDATION_ERROR", "Invalid message", errors=wrong)
    try:
        guess = int(str(action["number"]))
    except ValueError:
        wrong = [{"loc": ["number"], "msg": "Input should be a valid integer"}]
        return failure("VALIDATION_ERROR", "Invalid message", errors=wrong)
    if guess < 0:
        return failure("EXECUTION_ERROR", "the game is broken")
    if guess == number:
        return observation("right", reward=1.0, done=True)
    return observation("higher" if guess < number else "lower", reward=0.0)


async def schema(request: web.Request) -> web.Response:
    if request.match_info.get("fault") == "no_schema":
        raise web.HTTPNotFound
    return web.json_response(SCHEMA)


async def play(request: web.Request) -> web.WebSocketResponse:
    fault = request.match_info.get("fault")
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if fault == "full":
        await socket.send_json(failure("CAPACITY_REACHED", "1/1 sessions active"))
        await socket.close()
        return socket
    number = num_steps = 0
    async for message in socket:
        fields = json.loads(message.data)
        if fields["type"] == "reset":
            number, num_steps = fields["data"]["seed"] % 10, 0
            await socket.send_json(observation("I think of a digit."))
            continue
        if fields["type"] == "state":
            await socket.send_json({"type": "state", "data": {"step_count": num_steps}})
            continue
        num_steps += 1
        if num_steps == 2 and fault == "hangs":
            await asyncio.sleep(600)
        if num_steps == 2 and fault == "hangs_up":
            break
        if num_steps == 2 and fault:
            await socket.send_str(FAULTS[fault])
        else:
            await socket.send_json(answer(fields["data"], number))
    return socket


if __name__ == "__main__":
    app = web.Application()
    for prefix in ("", "/{fault}"):
        app.add_routes([web.get(f"{prefix}/schema", schema), web.get(f"{prefix}/ws", play)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, shutdown_timeout=0)
