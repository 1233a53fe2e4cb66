"""The process of a router: ``python -m hybridrl.serving.router_child ARGUMENTS.json``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from hybridrl.workers.rollout.sglang.process import end_with_parent


def route(file: Path) -> None:
    """Run a router with the arguments in ``file``, until the parent is gone."""
    end_with_parent()
    router = import_module("sglang_router.launch_router")  # by name: it need not be installed
    arguments = import_module("sglang_router.router_args").RouterArgs
    router.launch_router(arguments(**json.loads(file.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    route(Path(sys.argv[1]))
