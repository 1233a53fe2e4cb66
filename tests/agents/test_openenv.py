from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.agents.environments import Environments, load_environment
from hybridrl.agents.tool_process import ToolLimits
from tests.agents.test_environments import LIMITS, ROW, asked, play, play_all, rewards_of, texts_of
from tests.waiting import wait_until

FOLDER = Path(__file__).parent
REAL = os.environ.get("OPENENV_PYTHON")
NUMBER = (2**40 + 3) % 2**31 % 10  # of the seed that the conversations of test_environments have


def free_port() -> int:
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """The address of a server of the game, in a process of its own."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command[:2], str(port), *command[2:]])

    def is_there() -> bool:
        try:
            urllib.request.urlopen(f"{address}/schema", timeout=5).close()
        except urllib.error.URLError:
            return False
        return True

    try:
        wait_until(is_there, process=process)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture(
    scope="module",
    params=[
        "ours",
        pytest.param(
            "openenv",
            marks=pytest.mark.skipif(REAL is None, reason="make test-standards gives an OpenEnv"),
        ),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    ours = [sys.executable, str(FOLDER / "openenv_server.py")]
    real = [str(REAL), str(FOLDER / "openenv_game.py"), "3"]
    with serving(ours if request.param == "ours" else real) as address:
        yield address


@pytest.fixture(scope="module")
def faulty() -> Iterator[str]:
    with serving([sys.executable, str(FOLDER / "openenv_server.py")]) as address:
        yield address


def environments_at(address: str, timeout_s: float = 20.0) -> Environments:
    kind = load_environment(f"openenv:{address}")
    return Environments(kind, limits=ToolLimits(timeout_s=timeout_s, max_chars=1000))


def test_a_server_answers_and_rewards_each_turn(server: str) -> None:
    other = (NUMBER + 1) % 10
    turns = [f" {other}", "none", '{"number": -0.5}', '{"digit": 3}', f'{{"number": {NUMBER}}}']
    trajectory = play(environments_at(server), turns)
    texts = texts_of(trajectory)
    assert texts[0].endswith(asked("Q\n\nI think of a digit."))
    assert texts[2] == f"\n{asked('lower' if other > NUMBER else 'higher')}"
    assert "Error: number: Input should be a valid integer" in texts[4]
    assert "Error: number: " in texts[6]
    assert "Error: number: Field required" in texts[8]
    assert rewards_of(trajectory) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert trajectory.ended == "answer"


def test_each_conversation_has_a_session_of_its_own(server: str) -> None:
    scripts = [[str(NUMBER)], ["9", "0", str(NUMBER)], ["0"] * 9]
    trajectories = play_all(environments_at(server), scripts, num_turns=4)
    for number in range(3):  # as many as the server holds: those before have been closed
        assert play(environments_at(server), ["0"] * 9, num_turns=3).ended == "turns", number
    assert [trajectory.ended for trajectory in trajectories] == ["answer", "answer", "turns"]
    assert [sum(rewards_of(each)) for each in trajectories] == [1.0, 1.0, 0.0]


def test_what_the_environment_raises_costs_its_conversation(server: str) -> None:
    trajectory = play(environments_at(server), ["-1"])
    assert trajectory.ended == "error"
    assert f"the OpenEnv server at {server} answered step with" in trajectory.failure
    assert "the game is broken" in trajectory.failure


def test_a_class_says_what_turns_mean(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_SERVER", f"{server}/")
    environments = Environments(
        load_environment(f"{FOLDER / 'openenv_games.py'}:InWords"), limits=LIMITS
    )
    trajectory = play(
        environments, ["Is it 3?", "No idea.", "It is 4."], row=replace(ROW, answer="4")
    )
    texts = texts_of(trajectory)
    assert texts[0].endswith(asked("Q\n\nIt is I think of a digit.."))
    assert texts[2] == f"\n{asked('It is higher. 1 steps')}"
    assert texts[4] == f"\n{asked('Say a digit. 1 steps')}"
    assert rewards_of(trajectory) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "num_turns", "reason"),
    [
        ("garbage", 2, "answered step with 'no JSON'"),
        ("list", 2, r"answered step with \[1\]"),
        ("undone", 2, "answered step with {"),
        ("nan", 2, "must be finite"),
        ("raises", 2, "EXECUTION_ERROR"),
        ("hangs_up", 2, "answered step with 'CLOSE"),
        ("hangs", 2, "took longer than 1 s"),
        ("full", 0, "answered reset with .*CAPACITY_REACHED"),
        ("no_schema", 0, "404, message='Not Found'"),
        ("down", 0, "Cannot connect to host 127.0.0.1"),
    ],
)
def test_a_fault_of_a_server_costs_its_conversation(
    faulty: str, fault: str, num_turns: int, reason: str
) -> None:
    address = f"http://127.0.0.1:{free_port()}" if fault == "down" else f"{faulty}/{fault}"
    trajectory = play(environments_at(address, timeout_s=1.0), [str(NUMBER + 1)] * 9)
    assert trajectory.ended == "error"
    assert len(rewards_of(trajectory)) == max(num_turns, 1)  # of no turn there is an empty one
    assert re.search(reason, trajectory.failure)
