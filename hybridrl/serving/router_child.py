"""The process of a router: ``python -m hybridrl.serving.router_child ARGUMENTS.json``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from hybridrl.workers.rollout.sglang.process import end_with_parent


def route(file: Path) -> None:
    """Run a router with the arguments in ``file``, until the parent is gone.

    ``sglang_router.launch_router`` would do the same, but imports all of SGLang: 8 s.
    """
    end_with_parent()
    router = import_module("sglang_router.router").Router  # by name: it need not be installed
    arguments = import_module("sglang_router.router_args").RouterArgs
    import_module("setproctitle").setproctitle("sglang::router")
    router.from_args(arguments(**json.loads(file.read_text(encoding="utf-8")))).start()


if __name__ == "__main__":
    route(Path(sys.argv[1]))
