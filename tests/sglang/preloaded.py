"""Imported by the server that servers of SGLang are forked from: what each would import anew."""

from __future__ import annotations

from importlib import import_module

from tests.sglang import late_rank

import_module("sglang.launch_server")
import_module("sglang.srt.plugins").load_plugins()  # in this order, as in a start
for name in ("entrypoints.http_server", "managers.scheduler", "models.registry"):
    import_module(f"sglang.srt.{name}")
import_module("hybridrl.workers.rollout.sglang.encoder_routes")
late_rank.install()
