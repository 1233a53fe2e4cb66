"""One rank's device as a worker has it: two real engines, and the manager that gives them turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.metrics import check_declared
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.train.protocol import WeightSet
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.sharding.managers import sharding_manager
from tests.workers.train.engines import make_rows, update
from tests.workers.train.lora_engines import LORA, build_lora

PROMPTS = make_prompts((4, 9, 5))
SAMPLING = sampling_params(group=2, tokens=6)
WAYS: dict[str, tuple[bool, Literal["resident", "backup", "resend"]]] = {
    "awake": (False, "resident"),
    "resident": (True, "resident"),
    "backup": (True, "backup"),
    "resend": (True, "resend"),
}
"""Whether engines sleep, and what becomes of frozen weights then."""


def largest_mismatch_nats(
    trainer: Any, rollouts: RolloutBatch, *, temperature: float = SAMPLING.temperature
) -> float:
    scored = trainer.compute_logprobs(rollouts, temperature=temperature)
    apart = scored.logprobs_BL.values() - rollouts.sampler_logprobs_BL.values()
    apart = apart[rollouts.response_mask_BL.values()]
    assert len(apart) >= len(rollouts)
    assert torch.isfinite(apart).all()
    return float(apart.abs().max())


class Device:
    def __init__(
        self,
        engine: Any,
        trainer: Any,
        *,
        config: RolloutConfig,
        lora: LoraConfig | None = None,
        prompts: PromptBatch = PROMPTS,
        sampling: SamplingParams = SAMPLING,
    ) -> None:
        self.engine = engine
        self.trainer = trainer
        self.version = 0
        self.control = ControlGroup(timeout_s=150.0)
        self.manager = sharding_manager(engine, config=config, control=self.control, lora=lora)
        self.manager.attach_policy(trainer)
        self._prompts = prompts
        self._sampling = sampling

    def sample(self, sampling: SamplingParams | None = None) -> list[Sample]:
        with self.manager.rollout_phase() as engine:
            assert engine is self.engine
            return engine.run(single_turn(self._prompts, sampling or self._sampling))

    def rollouts(self) -> RolloutBatch:
        return assemble_rollouts(self._prompts, self.sample(), policy_version=self.version)

    def apart_nats(self, responses: list[Sample], *, temperature: float) -> float:
        rollouts = assemble_rollouts(self._prompts, responses, policy_version=self.version)
        self.manager.require_training()
        return largest_mismatch_nats(self.trainer, rollouts, temperature=temperature)

    def mismatch_nats(self) -> float:
        return self.apart_nats(self.sample(), temperature=self._sampling.temperature)

    def train(self) -> None:
        update(self.trainer, make_rows(4, seed=self.version))
        self.version += 1
        self.manager.weights_changed(version=self.version)

    def take_bytes(self, name: str) -> float:
        metrics = self.manager.take_metrics()
        check_declared(metrics)
        return metrics[f"memory/{name}"].value if f"memory/{name}" in metrics else 0

    def bytes_of(self, part: WeightSet) -> int:
        return sum(spec.num_bytes for spec in self.trainer.weight_specs(part))


class LoraDevice(Device):
    """The same with a trainer that learns an adapter, whose frozen weights sleep in one of `WAYS`.

    Args:
        make_engine: makes the rollout engine for the adapter that is sent, None if it is merged.
        config: of the rollout; ``sleep`` is what the way says.
    """

    def __init__(
        self,
        make_engine: Any,
        folder: Path,
        way: str,
        *,
        config: RolloutConfig,
        lora: LoraConfig = LORA,
        **asked: Any,
    ) -> None:
        sleep, base = WAYS[way]
        self.lora = replace(lora, base=base)
        sent = self.lora if self.lora.sends_adapters else None
        config = replace(config, sleep=sleep)
        trainer = build_lora(folder, lora=self.lora)
        super().__init__(make_engine(config, sent), trainer, config=config, lora=sent, **asked)


class Journalling:
    """Comes before a rollout engine in a class, and writes down what reaches the engine."""

    journal: list[str]
    received: list[str]
    """Names of the tensors that came."""

    def forget_journal(self) -> None:
        self.journal, self.received = [], []

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self.journal.append("base")
        self.received += [span.name for span in staged.spans]
        super().load(staged, handles)  # type: ignore[misc]

    def load_adapter(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self.journal.append("load adapter")
        self.received += list(tensors)
        super().load_adapter(tensors, version=version)  # type: ignore[misc]

    def unload_adapter(self, *, kept: Collection[int] = ()) -> None:
        self.journal.append("unload adapter")
        super().unload_adapter(kept=kept)  # type: ignore[misc]

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        self.journal.append(f"release {part.value}")
        super().release(part, backup=backup)  # type: ignore[misc]

    def resume(self, part: MemoryTag) -> None:
        self.journal.append(f"resume {part.value}")
        super().resume(part)  # type: ignore[misc]


def check_passes(device: LoraDevice, way: str) -> None:
    """The base goes before the first adapter, and afterwards only where it is sent again."""
    base, adapter = (device.bytes_of(part) for part in (WeightSet.BASE, WeightSet.ADAPTER))
    device.engine.forget_journal()
    device.sample()
    assert [call for call in device.engine.journal if "re" not in call] == [
        *("base", "unload adapter", "load adapter")
    ]
    assert device.take_bytes("synced_bytes") == base + adapter
    for _ in range(2):
        device.train()
        device.engine.forget_journal()
        device.sample()
        resent = base if way == "resend" else 0
        assert device.take_bytes("synced_bytes") == resent + adapter
        assert all("lora_" in name for name in device.engine.received) == (not resent)
        sends = [call for call in device.engine.journal if "re" not in call]
        assert sends[-2:] == ["unload adapter", "load adapter"]
        assert "base" not in sends[1:]
