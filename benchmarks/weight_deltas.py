"""Bytes and seconds of updates of an engine on a device of its own: all weights, or what changed.

    python -m benchmarks.weight_deltas [--num-steps 10]

Needs SGLang; a random Qwen3 of 96 M parameters is made on the spot, and sent in bfloat16. For each
learning rate two runs of AdamW take the same steps on random tokens with random advantages. After
each one sends all weights, the other what changed. The first update, always of all weights, counts
for neither. Files are in memory, as after a warm-up: over a network, divide the bytes by its speed.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import cast

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.sides.measure import print_head, print_row, seconds_of
from benchmarks.weight_sync import CPU, make_model, rollout_config, start
from hybridrl.metrics import Sum
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.publishing import Publisher
from hybridrl.workers.sharding.weight_files import WeightSource, load_weights
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet

RATES = (1e-6, 5e-6, 1e-5)
DTYPE = torch.bfloat16


class Learner:
    """What an update asks of a policy engine; float32 weights, as FSDP2 keeps them."""

    weight_sets = (WeightSet.BASE,)

    def __init__(self, folder: Path, rate: float) -> None:
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)

    def full_weights(
        self, weight_set: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach().to(dtype)) for name, p in self.model.named_parameters())

    def step(self) -> None:
        ids_BL = torch.randint(0, self.model.config.vocab_size, (8, 32))
        advantages_B = torch.randn(8)
        logits_BLV = self.model(ids_BL[:, :-1]).logits
        logprobs_BL = -torch.nn.functional.cross_entropy(
            logits_BLV.transpose(1, 2), ids_BL[:, 1:], reduction="none"
        )
        self._optimizer.zero_grad()
        (-(logprobs_BL * advantages_B[:, None])).mean().backward()
        self._optimizer.step()


class OneServer(ManagerClient):
    """The manager of one server, within this process."""

    timeout_s = 600.0

    def __init__(self, engine: SGLangEngine, *, weight_deltas: bool) -> None:
        self.weight_deltas = weight_deltas
        config = replace(rollout_config(), dtype="bfloat16", verify_weights="never")
        self._managed = ManagedEngine(engine, config=config, device=CPU)
        control = ControlGroup(timeout_s=600.0)
        self.publisher = Publisher(self, config=config, device=CPU, control=control)
        self.load_s = 0.0

    def need_weights(self, *, version: int) -> bool:
        return True

    def update(self, source: WeightSource, *, version: int) -> None:
        size = bucket_bytes_for(0, CPU)
        self.load_s = seconds_of(
            lambda: load_weights(self._managed, source=source, version=version, bucket_bytes=size)
        )

    def leave(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=10)
    num_steps = parser.parse_args().num_steps
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as root:
        folder = make_model(Path(root))
        engine = start(folder, dtype="bfloat16")
        try:
            print_head("learning rate", "sent", "MiB", "changed", "rank 0, s", "engine, s")
            for rate in RATES:
                measure(engine, folder, rate, num_steps)
        finally:
            engine.shutdown()


def measure(engine: SGLangEngine, folder: Path, rate: float, num_steps: int) -> None:
    for sent in ("all weights", "changes"):
        learner = Learner(folder, rate)
        server = OneServer(engine, weight_deltas=sent == "changes")
        rows: list[tuple[float, float, float, float]] = []
        last = dict(learner.full_weights(dtype=DTYPE))
        for version in range(num_steps + 1):
            begin = time.perf_counter()
            server.publisher.bring(cast(PolicyEngine, learner), version=version)
            total_s = time.perf_counter() - begin
            new = dict(learner.full_weights(dtype=DTYPE))
            num_bytes = cast(Sum, server.publisher.take_metrics()["memory/synced_bytes"]).value
            rows.append(
                (num_bytes, changed_share(last, new), total_s - server.load_s, server.load_s)
            )
            last = new
            learner.step()
        server.publisher.close()
        num_bytes, share, rank_s, engine_s = map(mean, zip(*rows[1:], strict=True))
        print_row(
            *(f"{rate:g}", sent, f"{num_bytes / 2**20:.1f}", f"{share:.1%}"),
            *(f"{rank_s:.2f}", f"{engine_s:.2f}"),
        )


def changed_share(last: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    num_changed = sum(
        int((last[name].view(torch.int16) != tensor.view(torch.int16)).sum())
        for name, tensor in new.items()
    )
    return num_changed / sum(tensor.numel() for tensor in new.values())


if __name__ == "__main__":
    main()
