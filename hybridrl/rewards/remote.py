"""Asks a reward server over HTTP, with retries within a deadline and a bounded cache.

A request is ``POST url`` with the columns of several rows as JSON: ``{"responses": [...],
"answers": [...], "prompts": [...], "sources": [...]}``. The answer is ``{"rewards": [1.0, null]}``
in the same order, null for a row that the server cannot score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

import httpx
from pydantic import Field

from hybridrl.config.limits import Rows, Seconds
from hybridrl.json_text import to_json_text

COLUMNS = ("responses", "answers", "prompts", "sources")

_SHARE_OF_TIMEOUT = 0.9
"""So that rows fail one by one before the process is killed."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_ANSWER_BYTES, _ROW_BYTES = 1 << 16, 1 << 10
_MOST_SHOWN = 200  # characters

Reward = float | Exception


class RemoteError(Exception):
    """The server gave no rewards; says why."""


class _Unavailable(RemoteError):
    """It may give them at another time."""


async def http(  # noqa: PLR0913 - its arguments are keys of the configuration
    responses: list[str],
    answers: list[str],
    prompts: list[str],
    sources: list[str],
    timeout_s: float,
    *,
    url: str,
    batch_size: Rows = 32,
    num_connections: Annotated[int, Field(ge=1, le=1024, description="of one process")] = 4,
    request_timeout_s: Seconds = 10.0,
    cache: Literal["none", "memory", "file"] = "memory",
    cache_file: str = "",
    cache_rows: Annotated[int, Field(ge=1, le=10**8, description="held at once")] = 100_000,
) -> list[Reward]:
    """Return the server's rewards; for rows that it does not score the reason.

    Args:
        responses: and the other columns: B rows.
        timeout_s: of the call; requests are repeated during nine tenths of it.
        url: of the server.
        batch_size: rows of a request.
        num_connections: requests at a time, of each process.
        request_timeout_s: of one request.
        cache: where rewards are kept, by the text of their row.
        cache_file: of ``cache=file``; processes and runs may share it.
        cache_rows: kept, the latest ones.
    """
    deadline = time.monotonic() + _SHARE_OF_TIMEOUT * timeout_s
    columns = dict(zip(COLUMNS, (responses, answers, prompts, sources), strict=True))
    kept = _open_cache(cache, cache_file)
    keys = [
        hashlib.sha256(to_json_text([url, *row]).encode()).digest()
        for row in zip(*columns.values(), strict=True)
    ]
    rewards: dict[bytes, Reward] = {**kept.get(keys)} if kept else {}
    missing = [row for row, key in enumerate(keys) if key not in rewards]
    batches = [missing[at : at + batch_size] for at in range(0, len(missing), batch_size)]
    free = asyncio.Semaphore(num_connections)
    async with httpx.AsyncClient(timeout=request_timeout_s, trust_env=False) as client:
        server = _Server(client, url, request_timeout_s, deadline)

        async def ask(rows: Sequence[int]) -> None:
            async with free:
                values = await server.score(
                    {name: [column[row] for row in rows] for name, column in columns.items()}
                )
                rewards.update(zip((keys[row] for row in rows), values, strict=True))

        await asyncio.gather(*(ask(rows) for rows in batches))
    if kept:
        asked = {keys[row] for row in missing}
        kept.put({key: reward for key, reward in rewards.items() if key in asked}, cache_rows)
    return [rewards[key] for key in keys]


class _Server:
    """A reward server, until a deadline."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, request_timeout_s: float, deadline: float
    ) -> None:
        self._client = client
        self._url = url
        self._request_timeout_s = request_timeout_s
        self._deadline = deadline

    async def score(self, columns: Mapping[str, list[str]]) -> list[Reward]:
        """Return the rewards of some rows; the same error for each, if there are none."""
        num_rows = len(columns["responses"])
        wait_s = _FIRST_WAIT_S
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return await self._ask(to_json_text(columns).encode(), num_rows)
            except _Unavailable as error:
                pause_s = wait_s * random.uniform(0.5, 1.5)  # so that clients do not come together
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                if time.monotonic() + pause_s >= self._deadline:
                    reason = f"{self._url} {error}; asked {num_tries} times"
                    return [RemoteError(reason)] * num_rows
                await asyncio.sleep(pause_s)
            except RemoteError as error:
                return [RemoteError(f"{self._url} {error}")] * num_rows

    async def _ask(self, body: bytes, num_rows: int) -> list[Reward]:
        remaining_s = self._deadline - time.monotonic()
        limit_s = max(0.01, min(self._request_timeout_s, remaining_s))
        most_bytes = _ANSWER_BYTES + num_rows * _ROW_BYTES
        headers = {"content-type": "application/json"}
        asking = self._client.stream("POST", self._url, content=body, headers=headers)
        data = bytearray()
        try:
            async with asyncio.timeout(limit_s), asking as answer:
                async for chunk in answer.aiter_bytes():
                    data += chunk
                    if len(data) > most_bytes:
                        raise RemoteError(f"answered with more than {most_bytes} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Unavailable(f"did not answer within {self._request_timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise _Unavailable(
                f"cannot be reached ({str(error) or type(error).__name__})"
            ) from error
        except httpx.HTTPError as error:
            raise RemoteError(f"cannot be asked ({error})") from error
        shown = f"{bytes(data[:_MOST_SHOWN])!r}"
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise _Unavailable(f"answered with status {answer.status_code}: {shown}")
        if answer.status_code != 200:
            raise RemoteError(f"answered with status {answer.status_code}: {shown}")
        return _rewards_of(bytes(data), num_rows)


def _rewards_of(data: bytes, num_rows: int) -> list[Reward]:
    try:
        rewards = json.loads(data)["rewards"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        shown = f"{data[:_MOST_SHOWN]!r}"
        raise RemoteError(f'answered without {{"rewards": [...]}}: {shown}') from error
    if not isinstance(rewards, list) or len(rewards) != num_rows:
        size = len(rewards) if isinstance(rewards, list) else type(rewards).__name__
        raise RemoteError(f"answered with {size} rewards for {num_rows} responses")
    return [_reward_of(value) for value in rewards]


def _reward_of(value: object) -> Reward:
    """Return a finite number, or why there is none: it is asked for again."""
    is_bool = isinstance(value, bool)
    if isinstance(value, int | float) and not is_bool and abs(value) <= sys.float_info.max:
        return float(value)
    return RemoteError(f"the server gave {value!r:.80}")


class _Cache:
    """Rewards by key, in memory or in a file that several processes share."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        with self._database as database:
            database.execute("pragma journal_mode=wal")
            database.execute(
                "create table if not exists rewards "
                "(number integer primary key autoincrement, key blob unique, reward real)"
            )

    def get(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        question = "select key, reward from rewards where key = ? and reward is not null"
        rows = (self._database.execute(question, (key,)).fetchone() for key in keys)
        return {row[0]: row[1] for row in rows if row is not None}

    def put(self, rewards: Mapping[bytes, Reward], most_rows: int) -> None:
        """Keep rewards, and the latest ones of all; failures are asked for again."""
        known = [(key, reward) for key, reward in rewards.items() if isinstance(reward, float)]
        database = self._database
        database.execute("begin immediate")
        database.executemany("insert or replace into rewards (key, reward) values (?, ?)", known)
        database.execute(
            "delete from rewards where number <= (select max(number) from rewards) - ?",
            (most_rows,),
        )
        database.execute("commit")


@cache
def _open_cache(kind: str, file: str) -> _Cache | None:
    """Return the cache, one for each file and process."""
    if kind == "none":
        return None
    if (kind == "file") != bool(file):
        raise ValueError("cache=file and cache_file=PATH come together")
    try:
        return _Cache(file or ":memory:")
    except sqlite3.Error as error:
        raise ValueError(f"cache_file={file} cannot be used: {error}") from error
