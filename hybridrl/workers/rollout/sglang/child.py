"""The process of a server: ``python -m hybridrl.workers.rollout.sglang.child ARGUMENTS.json``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from hybridrl.workers.rollout.sglang.process import end_with_parent
from hybridrl.workers.rollout.sglang.server import refusal_of
from hybridrl.workers.rollout.sglang.start import load_server_args, unknown_names

_STATUS_REFUSED = 3


def serve(file: Path) -> None:
    """Run a server with the arguments in ``file``, until the parent is gone."""
    end_with_parent()
    # By name: they take seconds and change the process, which a client must avoid.
    run_server = import_module("sglang.launch_server").run_server
    server_args = load_server_args()
    arguments = json.loads(file.read_text(encoding="utf-8"))
    if unknown := unknown_names(server_args, arguments):
        for refusal in unknown:
            sys.stderr.write(refusal_of(refusal.names[0], refusal.fix) + "\n")
        raise SystemExit(_STATUS_REFUSED)
    run_server(server_args(**arguments))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
