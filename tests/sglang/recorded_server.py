"""A server that answers as a release of SGLang did, in a process of its own, within a second.

``python -m tests.sglang.recorded_server ARGUMENTS.json``, as the real one is started. It writes the
control calls that it gets to ``$RECORDED_CALLS``, one JSON object a line. It answers those in
``$RECORDED_DELAYS`` (JSON) so many seconds late.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybridrl.workers.rollout.sglang.process import end_with_parent

MODULE = "tests.sglang.recorded_server"
ANSWERS = Path(__file__).parents[1] / "workers/rollout/sglang_answers/0.5.21.json"


def calls_in(file: Path) -> list[tuple[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [(call["path"], call["body"]) for call in map(json.loads, lines)]


def serve(file: Path) -> None:
    end_with_parent()
    arguments = json.loads(file.read_text())
    recorded = json.loads(ANSWERS.read_text())
    changes = json.loads(os.environ.get("RECORDED_CHANGES", "{}"))
    delays = json.loads(os.environ.get("RECORDED_DELAYS", "{}"))
    answers = {"/server_info": recorded["server_info"] | arguments | changes, "/health": {}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(answers[self.path])

        def do_POST(self) -> None:
            body = json.loads(
                self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
            )
            with Path(os.environ["RECORDED_CALLS"]).open("a") as calls:
                calls.write(json.dumps({"path": self.path, "body": body}) + "\n")
            time.sleep(delays.get(self.path, 0.0))
            self._answer({"success": True})

        def _answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = False
    ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
