"""Agent programs: ``python programs.py KIND``. They import little, so that they start fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any


def ask(messages: list[Any]) -> Any:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 16}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]


def dies() -> None:
    sys.exit("no more\n")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    sys.stderr.write("waiting")
    sys.stderr.flush()
    time.sleep(600)


def floods() -> None:
    for stream in (sys.stdout, sys.stderr):
        for _ in range(200):
            stream.write("x" * 100_000)


def leaves_a_process() -> None:
    command = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    Path(sys.argv[2], str(child.pid)).touch()


def asks_for_nonsense() -> None:
    with suppress(urllib.error.HTTPError):
        ask([{"role": "tool"}, "x"])


def keeps_its_environment() -> None:
    folder = Path(os.environ["FOLDER"])
    (folder / str(os.getpid())).write_text(json.dumps(dict(os.environ)), encoding="utf-8")


def endless() -> None:
    chat = [{"role": "user", "content": "Q"}]
    while True:
        chat += [ask(chat), {"role": "user", "content": "More"}]


def answers() -> None:
    return


def main(kind: str) -> None:
    """Be a program of a kind, and ask twice if there still is one."""
    row = json.load(sys.stdin)
    globals()[kind]()
    chat = [{"role": "user", "content": f"{row['prompt']} {row['answer']}"}]
    chat.append(ask(chat))
    ask([*chat, {"role": "user", "content": "Sure?"}])


if __name__ == "__main__" and sys.argv[1] != "never_asks":
    main(sys.argv[1])
