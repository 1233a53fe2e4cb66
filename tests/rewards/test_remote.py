"""A reward server over a real socket: right, slow, broken, huge, down."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import RewardError
from hybridrl.rewards.scorer import RewardScorer, Scores
from tests.rewards.rows import inputs, scorer_of

Answer = Callable[[dict[str, list[str]], int], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    """Answers with what a function makes of the columns and the number of the request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[dict[str, list[str]]] = []
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that have gone are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        columns = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append(columns)
            number = len(self.server.requests)
        status, body = self.server.answer(columns, number)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def lengths(columns: dict[str, list[str]], number: int = 0) -> tuple[int, bytes]:
    return 200, json.dumps({"rewards": [len(text) for text in columns["responses"]]}).encode()


Serve = Callable[[Answer], Server]


@contextmanager
def serving() -> Iterator[Serve]:
    """Yield a function that starts servers."""
    servers = []

    def start(answer: Answer) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    with serving() as start:
        yield start


def scorer(
    port: int, *, on_error: str = "zero", timeout_s: float = 20.0, **args: ArgumentValue
) -> RewardScorer:
    args = {"url": f"http://127.0.0.1:{port}/score", **args}
    return scorer_of("http", args=args, on_error=on_error, timeout_s=timeout_s)


def score(server: Server, *responses: str, **options: object) -> Scores:
    with scorer(server.server_port, **options) as opened:  # type: ignore[arg-type]
        return opened.score(inputs(*responses))


def test_rows_are_asked_for_in_batches_and_keep_their_order(serve: Serve) -> None:
    server = serve(lengths)
    responses = ["x" * (row % 17) for row in range(100)]
    scores = score(server, *responses, batch_size=8)
    assert scores.rewards_B.tolist() == [len(text) for text in responses]
    assert {len(columns["responses"]) for columns in server.requests} <= {2, 8}
    assert set(server.requests[0]) == {"responses", "answers", "prompts", "sources"}


def test_a_server_that_stumbles_is_asked_again(serve: Serve) -> None:
    def stumble(columns: dict[str, list[str]], number: int) -> tuple[int, bytes]:
        return (503, b"busy") if number <= 3 else lengths(columns)

    assert score(serve(stumble), "ab", "c").rewards_B.tolist() == [2.0, 1.0]


def slowly(columns: dict[str, list[str]], number: int) -> tuple[int, bytes]:
    time.sleep(0.5 if "slow" in columns["responses"] else 0)
    return lengths(columns)


@pytest.fixture(scope="module")
def server_and_scorers(serve: Serve) -> Iterator[tuple[Server, RewardScorer, RewardScorer]]:
    """One that gives failed rows 0, and one that raises; both ask the server row by row."""
    server = serve(lengths)
    options = {"batch_size": 1, "timeout_s": 1.0}
    with (
        scorer(server.server_port, **options) as zero,  # type: ignore[arg-type]
        scorer(server.server_port, on_error="stop", **options) as stop,
    ):
        yield server, zero, stop


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ((500, b"oops"), r"answered with status 500: b'oops'; asked \d+ times"),
        ((404, b"nobody"), "answered with status 404: b'nobody'"),
        ((200, b"<html>"), "answered without .* b'<html>'"),
        ((200, b"[" * 50000), "answered without"),
        ((200, b'{"rewards": 3}'), "answered with int rewards for 1 responses"),
        ((200, b'{"rewards": [1, 2]}'), "answered with 2 rewards for 1 responses"),
        ((200, b'{"rewards": [null]}'), "the server gave None"),
        ((200, b'{"rewards": ["1"]}'), "the server gave '1'"),
        ((200, b'{"rewards": [NaN]}'), "the server gave nan"),
        ((200, b'{"rewards": [1%s]}' % (b"0" * 400)), "the server gave 1000"),
        ((200, b"x" * 1_000_000), r"answered with more than \d+ bytes"),
    ],
)
def test_a_bad_answer_fails_its_rows_with_the_reason(
    server_and_scorers: tuple[Server, RewardScorer, RewardScorer],
    bad: tuple[int, bytes],
    reason: str,
) -> None:
    server, zero, stop = server_and_scorers
    server.answer = lambda columns, number: (
        bad if columns["responses"] == ["bad"] else lengths(columns)
    )
    scores = zero.score(inputs("ab", "bad", "c"))
    assert scores.rewards_B.tolist() == [2.0, 0.0, 1.0]
    assert scores.is_failed_B.tolist() == [False, True, False]
    with pytest.raises(RewardError, match=f"response 1 'bad' to prompt '1': .*{reason}"):
        stop.score(inputs("ab", "bad", "c"))


def test_a_slow_answer_is_given_up_and_its_neighbours_are_kept(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"batch_size": 1, "timeout_s": 1.0, "request_timeout_s": 0.2}
    scores = score(serve(slowly), "ab", "slow", "c", **options)
    assert scores.rewards_B.tolist() == [2.0, 0.0, 1.0]
    assert "RemoteError: http://127.0.0.1" in caplog.text
    assert "did not answer within 0.2 s" in caplog.text


def test_a_server_that_is_down_is_named() -> None:
    with serving() as start:
        port = start(lengths).server_port
    with (
        scorer(port, timeout_s=1.0, on_error="stop") as opened,
        pytest.raises(RewardError, match=rf"http://127.0.0.1:{port}/score cannot be reached"),
    ):
        opened.score(inputs("a"))


@pytest.mark.parametrize("cache", ["none", "memory", "file"])
def test_rows_that_are_cached_are_not_asked_for_again(
    serve: Serve, cache: str, tmp_path: Path
) -> None:
    server = serve(lengths)
    file = str(tmp_path / "rewards.sqlite") if cache == "file" else ""
    for _ in range(2):  # two runs
        with scorer(server.server_port, cache=cache, cache_file=file) as opened:
            for _ in range(2):
                assert opened.score(inputs("ab")).rewards_B.tolist() == [2.0]
    assert len(server.requests) == {"none": 4, "memory": 2, "file": 1}[cache]


def test_a_cache_keeps_the_latest_rows_alone(serve: Serve, tmp_path: Path) -> None:
    server = serve(lengths)
    file = str(tmp_path / "rewards.sqlite")
    with scorer(server.server_port, cache="file", cache_file=file, cache_rows=2) as opened:
        for text in ("a", "ab", "abc", "abc", "ab", "a"):
            opened.score(inputs(text))
    assert [each["responses"] for each in server.requests] == [["a"], ["ab"], ["abc"], ["a"]]
