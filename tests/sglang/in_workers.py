"""Imported where Ray's workers are forked: in tests of SGLang their servers are forked, too."""

from __future__ import annotations

import os

from hybridrl.workers.rollout.sglang import server
from tests.sglang import warm

if warm.SOCKET in os.environ:
    server._CHILD = warm.__name__
