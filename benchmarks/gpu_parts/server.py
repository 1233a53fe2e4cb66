"""What is known of the server behind a rollout engine: its log, and checksums of its tensors."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from hybridrl.workers.rollout.protocol import RolloutEngine

_CAPTURE = re.compile(r"Capture (.+?) begin\.")
LOGGING = ("log_level=info", "log_level_http=warning")
"""Engine arguments without which the server does not write what is counted here."""


def server_of(engine: RolloutEngine) -> Any:  # noqa: ANN401 - `Server`, which only SGLang's has
    """Return the server of an engine that has one; None of the embedded engine."""
    return vars(engine).get("_server")


def count_graph_captures(engine: RolloutEngine) -> int | None:
    """Return how often the server captured its CUDA graphs of one kind; the most of any kind.

    SGLang captures graphs of decode steps and, where it chooses to, of prefill; each kind once, at
    its start. None where there is no server, or its log shows no capture.
    """
    server = server_of(engine)
    if server is None:
        return None
    text = server.process.log_file.read_text(encoding="utf-8", errors="replace")
    kinds = Counter(_CAPTURE.findall(text))
    return max(kinds.values()) if kinds else None


def checksums(engine: RolloutEngine) -> dict[str, str]:
    """Return the server's own checksum of each tensor that it compares, by its name there."""
    server = server_of(engine)
    if server is None:
        raise TypeError("only a server tells checksums of its tensors")
    answer = server.post("/weights_checker", action="checksum")
    found: dict[str, str] = {}
    for number, rank in enumerate(answer["ranks"]):
        found |= {f"{number}:{name}": value for name, value in rank["checksums"].items()}
    return found
