"""Imported by the server that ranks are forked from, so that megatron is imported once."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from tests.megatron.stand_ins import install

if find_spec("megatron") is not None:
    install()
    import_module("hybridrl.workers.train.megatron.backend")
