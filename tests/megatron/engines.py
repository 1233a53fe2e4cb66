"""Policies on megatron-core, as a rank of any sizes builds them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.actor import ActorConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LoraConfig
from hybridrl.models.adapter import Adapter
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.megatron.stand_ins import install
from tests.workers.train.engines import ACTOR, CPU, MODEL

_HERE = Path(__file__).parent


def run_with_transformer_engine(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program on whose path is a stand-in with TransformerEngine's names (``packages``)."""
    paths = [str(_HERE / "packages"), str(_HERE.parents[1])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}  # see ``install``
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )


def build_megatron(
    folder: Path, config: ActorConfig = ACTOR, *, lora: LoraConfig | None = None, **megatron: Any
) -> PolicyEngine:
    """``megatron``: changes of that section."""
    install()
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    section = replace(MegatronConfig(), **megatron)
    backend = MegatronBackend(
        folder,
        config=replace(config, engine="megatron"),
        context=MegatronContext(megatron=section, model=MODEL, device=CPU, seed=0, timeout_s=60.0),
        num_total_steps=10,
        adapter=None if lora is None else Adapter(lora, seed=0),
    )
    return PolicyEngine(backend)
