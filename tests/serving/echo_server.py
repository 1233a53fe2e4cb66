"""Answers as much of SGLang's HTTP as the router and samplers ask for.

It is called as ``echo_server.py PORT [S [HOST]]``. A response takes S seconds, and repeats the seed
of its request. The version of its weights is 0, or what ``/update_weight_version`` was told.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tests.serving.elsewhere import ElsewhereServer

TOKENS = 8


class EchoServer(ElsewhereServer):
    seconds = 0.0

    def answer(self, path: str, body: dict[str, Any], sent_key: str) -> tuple[int, object]:
        if path == "/update_weight_version":
            self.info["weight_version"] = body["new_version"]
        if not body:
            return 200, self.info
        params = body.get("sampling_params", {})
        if params.get("max_new_tokens"):
            time.sleep(self.seconds)
        num_tokens = min(TOKENS, params.get("max_new_tokens", 1))
        response = self._response([params.get("sampling_seed", 1)], {"max_new_tokens": num_tokens})
        response["meta_info"] |= {"port": self.port, "echo": {"key": sent_key, "body": body}}
        return 200, {"text": ""} | response


if __name__ == "__main__":
    EchoServer.seconds = float(sys.argv[2]) if sys.argv[2:] else 0.0
    EchoServer(
        port=int(sys.argv[1]),
        host=sys.argv[3] if sys.argv[3:] else "127.0.0.1",
        model_path=str(Path(__file__).parent),
        weight_version="0",
        dp_size=1,
        tp_size=1,
    ).thread.join()
