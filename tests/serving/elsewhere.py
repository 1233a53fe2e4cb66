"""A server that others run, for tests: as much of SGLang's HTTP as is asked of one, in a thread.

Each response repeats the last token of its context, with log-probs of -1.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

VOCAB_SIZE = 260
INFO: dict[str, Any] = {
    "version": "0.5.21",
    "model_path": "/elsewhere/judge",
    "served_model_name": "judge",
    "model_type": "qwen3",
    "is_generation": True,
    "dtype": "float32",
    "quantization": None,
    "load_format": "auto",
    "disaggregation_mode": "null",
    "context_length": 200,
    "max_req_input_len": 194,
    "weight_version": "default",
}


class _Server(ThreadingHTTPServer):
    request_queue_size = 64


class ElsewhereServer:
    """Its answers follow ``info`` and ``key``, which a test may change at any time."""

    def __init__(
        self, *, key: str = "", port: int = 0, host: str = "127.0.0.1", **info: Any
    ) -> None:
        self.info = INFO | {"api_key": key} | info
        self.vocab_size = VOCAB_SIZE
        self.key = key
        self.moves_to: str | None = None
        """Another server, to which it redirects."""
        self.spoils: dict[str, Any] = {}
        """Fields of each response that are replaced."""
        self.repeats_headers = False
        """Whether it answers every request with its headers, as an error."""
        self.sums: dict[str, str] | None = {"model.norm.weight": "1", "lm_head.weight": "2"}
        """Checksums of its weights; None: it has no route for them."""
        self.unstuck = threading.Event()
        self.asked: list[tuple[str, str]] = []
        """Route and Authorization of each request."""
        self.dies_after: int | None = None
        """Requests for tokens until it is gone."""
        self.is_stuck = False
        """Whether it never answers a request for tokens."""
        self.is_gone = False
        """Whether it closes every connection without an answer."""
        self._server = _Server((host, port), _handler_of(self))
        self.port = int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}"
        self.thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def num_responses(self) -> int:
        return len([path for path, _ in self.asked if path == "/generate"])

    def stop(self) -> None:
        self.is_gone = True  # for connections that are open
        self.unstuck.set()
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()

    def answer(self, path: str, body: dict[str, Any], sent_key: str) -> tuple[int, object]:
        if self.repeats_headers:
            return 500, {"error": {"message": f"you sent {sent_key}"}}
        if self.key and sent_key != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/generate":
            return self._generate(body)
        if path == "/weights_checker" and self.sums is not None:
            return 200, {"success": True, "ranks": [{"checksums": self.sums}]}
        fields = {"/server_info": INFO, "/model_info": INFO, "/abort_request": {}}.get(path)
        return (404, {"detail": "Not Found"}) if fields is None else (200, self.info)

    def _generate(self, body: dict[str, Any]) -> tuple[int, object]:
        wrong = [n for n in body.get("token_ids_logprob", []) if n >= self.vocab_size]
        if wrong:
            return 400, {"error": {"message": f"valid range is [0, {self.vocab_size})."}}
        contexts, params = body["input_ids"], body["sampling_params"]
        if not isinstance(params, list):
            return 200, self._response(contexts, params)
        return 200, [self._response(*pair) for pair in zip(contexts, params, strict=True)]

    def _response(self, context: list[int], params: dict[str, Any]) -> dict[str, Any]:
        tokens = [context[-1]] * params["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"},
            "weight_version": self.info["weight_version"],
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta} | self.spoils


class TakingServer(ElsewhereServer):
    """One that takes weights and control calls, as the server of a policy must."""

    ROUTES = (
        *("/abort_request", "/flush_cache", "/pause_generation", "/continue_generation"),
        *("/update_weight_version", "/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/begin_weight_update", "/end_weight_update", "/weights_checker", "/v1/loads"),
        *("/init_weights_update_group", "/update_weights_from_distributed"),
        *("/destroy_weights_update_group", "/release_memory_occupation"),
    )

    def __init__(self, *, key: str = "", port: int = 0, **info: Any) -> None:
        super().__init__(key=key, port=port, **({"tp_size": 1} | info))
        self.is_paused = False
        self.has_update = False
        """Whether an update was begun and not ended."""
        self.refuses_control = False
        """Whether control calls need another key."""
        self.sees_folder = True
        """Whether it finds the folder of weights."""
        self.load_s = 0.0
        """Seconds that it takes to load one."""

    @property
    def controlled(self) -> list[str]:
        """The control calls that it has got, in order."""
        return [path.partition("?")[0] for path, _ in self.asked if "_" in path and self._is(path)]

    def _is(self, path: str) -> bool:
        return path.partition("?")[0] in self.ROUTES

    def answer(self, path: str, body: dict[str, Any], sent_key: str) -> tuple[int, object]:
        status, content = super().answer(path, body, sent_key)
        if status in (401, 500) or not (self._is(path) or path == "/openapi.json"):
            return status, content
        if path == "/openapi.json":
            return 200, {"paths": {route: {} for route in self.ROUTES}}
        if self.refuses_control:
            return 403, {"error": "Forbidden"}
        return self._control(path.partition("?")[0], body)

    def _control(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
        if path == "/update_weight_version":
            self.info["weight_version"] = body["new_version"]
        if path in ("/begin_weight_update", "/end_weight_update"):
            begins = path == "/begin_weight_update"
            if self.has_update is begins:
                return 400, {"error": {"message": "not in this order"}}
            self.has_update = begins
        if path == "/update_weights_from_disk":
            time.sleep(self.load_s)
            if not self.sees_folder:
                return 400, {"success": False, "message": "no such folder"}
        return 200, {"success": True, "loads": [{"timestamp": 1.0, "decode_moments": [0]}]}


def _handler_of(server: ElsewhereServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            sent_key = self.headers.get("Authorization", "")
            server.asked.append((self.path, sent_key))
            server.is_gone |= server.num_responses == server.dies_after
            if server.is_gone:
                self.close_connection = True
                return
            if server.moves_to is not None:
                self.send_response(307)
                self.send_header("Location", server.moves_to + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if server.is_stuck and self.path == "/generate":
                server.unstuck.wait()
            status, content = server.answer(self.path, body, sent_key)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that has given up
                self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


elsewhere, taking = ElsewhereServer, TakingServer
"""As contexts, which stop them."""


def files_with(text: str, folder: Path) -> list[str]:
    """The files below a folder that contain a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if text.encode() in path.read_bytes()]
