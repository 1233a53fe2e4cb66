"""Answers as much of SGLang's HTTP as the router and samplers ask for.

It is called as ``echo_server.py PORT [S [HOST]]``. A response takes S seconds, and repeats the seed
of its request. The version of its weights is 0, or what ``/update_weight_version`` was told.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

INFO = {
    "model_path": str(Path(__file__).parent),
    "served_model_name": "tiny",
    "is_generation": True,
}
TOKENS = 8


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seconds: ClassVar[float] = 0.0
    state: ClassVar[dict[str, str]] = {"version": "0"}

    def do_GET(self) -> None:
        version = {"weight_version": self.state["version"]}
        self._answer(INFO | version | {"dp_size": 1, "tp_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weight_version":
            self.state["version"] = body["new_version"]
        params = body.get("sampling_params", {})
        if params.get("max_new_tokens"):
            time.sleep(self.seconds)
        sent = {"key": self.headers["Authorization"], "body": body}
        _, port = cast(tuple[str, int], self.server.server_address)
        self._answer(response(params) | {"meta_info": self._meta(params, port) | {"echo": sent}})

    def _meta(self, params: dict[str, Any], port: int) -> dict[str, Any]:
        return {
            "port": port,
            "finish_reason": {"type": "length"},
            "weight_version": self.state["version"],
            "output_token_logprobs": [[-1.0, token, None] for token in tokens_of(params)],
        }

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def tokens_of(params: dict[str, Any]) -> list[int]:
    length = min(TOKENS, params.get("max_new_tokens", 1))
    return [params.get("sampling_seed", 1)] * length


def response(params: dict[str, Any]) -> dict[str, Any]:
    return {"text": "", "output_ids": tokens_of(params)}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    Echo.seconds = float(sys.argv[2]) if sys.argv[2:] else 0.0
    host = sys.argv[3] if sys.argv[3:] else "127.0.0.1"
    Server((host, int(sys.argv[1])), Echo).serve_forever()
