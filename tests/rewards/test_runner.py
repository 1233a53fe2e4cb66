"""The process of a reward function when that answers something else, or is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hybridrl.processes.pool import CallFailed, CallHung, CallKilled
from hybridrl.rewards.runner import FunctionFile, RewardProcess
from tests.rewards.rows import inputs, write_function

Open = Callable[..., RewardProcess]


def call(process: RewardProcess, *responses: str, **columns: object) -> Sequence[float | str]:
    rewards, failure = process.score(inputs(*responses, **columns))
    if failure is not None:
        raise failure
    return [rewards[row] for row in range(len(responses))]


@pytest.fixture
def open_runner(tmp_path: Path) -> Iterator[Open]:
    """Write the body of a reward function to a file, and load it."""
    with ExitStack() as opened:

        def open_one(
            body: str, *, columns: str = "responses, **_", timeout_s: float = 20.0
        ) -> RewardProcess:
            frame = "frame = lambda data: struct.pack('!Q', len(data)) + data\n"
            write_function(tmp_path, f"{frame}def reward({columns}):", body)
            function = FunctionFile(path=tmp_path / "mine.py", name="reward", args={})
            return opened.enter_context(closing(RewardProcess([function], timeout_s=timeout_s)))

        yield open_one


@pytest.mark.shows("R5.2")
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("frame(b'{\"call\": 1}')", "not a list of rewards"),
        ('frame(b\'{"call": 1, "rewards": [true]}\')', "not a list of rewards"),
        ('frame(b\'{"call": 1, "row": 3, "rewards": [1.0]}\')', "rows that were not asked for"),
    ],
)
def test_garbage_on_the_socket_costs_the_call_and_not_the_next(
    open_runner: Open, sent: str, words: str
) -> None:
    runner = open_runner(
        f"""
        if responses == ["write"]:
            os.write(int(sys.argv[-1]), {sent})
        return [1.0]
        """
    )
    with pytest.raises(CallFailed, match=words):
        call(runner, "write")
    assert call(runner, "no more") == [1.0]


@pytest.mark.shows("R5.3")
def test_a_process_killed_during_a_call_is_asked_again_and_named(
    open_runner: Open, caplog: pytest.LogCaptureFixture
) -> None:
    runner = open_runner(
        """
        if not os.path.exists(NOTES):
            open(NOTES, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0]
        """
    )
    with caplog.at_level(logging.WARNING, logger="hybridrl"):
        assert call(runner, "a") == [1.0]
    [message] = caplog.messages
    assert "mine.py:reward was killed by SIGKILL during a call" in message
    assert "started again (1 of 2)" in message


@pytest.mark.shows("R5.3")
def test_a_process_that_is_always_killed_is_given_up(open_runner: Open, tmp_path: Path) -> None:
    runner = open_runner(
        """
        open(NOTES, "a").write(".")
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    with pytest.raises(CallKilled, match="was killed by SIGTERM"):
        call(runner, "a")
    assert (tmp_path / "notes").read_text() == "..."


@pytest.mark.shows("R5.3")
def test_restarts_do_not_prolong_the_deadline(open_runner: Open, tmp_path: Path) -> None:
    runner = open_runner(
        """
        open(NOTES, "a").write(".")
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        timeout_s=1.0,
    )
    runner.start()  # whose seconds count, too
    with pytest.raises(CallHung, match="took longer than 1 s"):
        call(runner, "a")
    assert len((tmp_path / "notes").read_text()) <= 2  # at the third death it would be given up


def test_a_function_may_ask_for_the_conversation(open_runner: Open) -> None:
    body = "return len(conversation) + (conversation[-1]['text'] == response)"
    runner = open_runner(body, columns="conversation, response")
    said = [[{"role": "assistant", "text": "x"}, {"role": "tool", "text": "7"}]]
    assert call(runner, "7", conversations=said) == [3.0]
    assert call(runner, "a", "b") == [2.0, 2.0]  # single turns are conversations, too
