"""Imported where Ray's workers are forked: in tests of SGLang their servers are forked, too."""

from __future__ import annotations

import os
from importlib import import_module

from tests.sglang.warm import SOCKET

if SOCKET in os.environ:
    import_module("hybridrl.workers.rollout.sglang.server")._CHILD = "tests.sglang.warm"
