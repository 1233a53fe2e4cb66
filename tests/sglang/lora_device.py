"""One rank as a worker has it: a LoRA trainer and a real SGLang server that share a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.lora import LoraConfig
from hybridrl.errors import PhaseError
from hybridrl.metrics import check_declared
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.protocol import MemoryTag, Response, SamplingParams
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.train.protocol import WeightSet
from tests.sglang.engines import sglang_config
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.train.engines import CPU, make_rows, update
from tests.workers.train.lora_engines import LORA, build_lora

PROMPTS = make_prompts((4, 9, 40))
SAMPLING = replace(sampling_params(group=4, tokens=8), temperature=0.7)
GREEDY = sampling_params(group=1, tokens=8, temperature=0.0)
WAYS = {
    "awake": (False, "resident"),
    "resident": (True, "resident"),
    "backup": (True, "backup"),
    "resend": (True, "resend"),
}
"""Whether engines sleep, and what becomes of frozen weights then."""


class ForgetfulEngine(SGLangEngine):
    """Writes down what reaches it, and loses on a CPU what a release loses on a GPU."""

    journal: list[str]
    received: list[str]

    def forget_journal(self) -> None:
        self.journal, self.received = [], []

    def update_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.journal.append("base")
        self.received += [name for name, _ in tensors]
        super().update_weights(tensors)

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self.journal.append("load adapter")
        self.received += list(tensors)
        super().load_adapter(tensors)

    def unload_adapter(self) -> None:
        self.journal.append("unload adapter")
        super().unload_adapter()

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        self.journal.append(f"release {part.value}")
        super().release(part, backup=backup)
        if part is MemoryTag.WEIGHTS and not backup:
            self.scramble()

    def resume(self, part: MemoryTag) -> None:
        self.journal.append(f"resume {part.value}")
        super().resume(part)

    def scramble(self) -> None:
        """Fill all of the server's weights with random numbers."""
        self._server.require_success("/weights_checker", action="reset_tensors")


def wake_up(engine: SGLangEngine) -> None:
    """Bring an engine that serves many tests to a known state: all resident, no adapter."""
    for part in MemoryTag:
        with suppress(PhaseError):  # it is resident
            engine.resume(part)
    engine.unload_adapter()
    engine.continue_generation()


class Device:
    """Both real engines of one rank."""

    def __init__(
        self,
        engine: SGLangEngine,
        folder: Path,
        way: str,
        *,
        lora: LoraConfig = LORA,
        **changes: object,
    ) -> None:
        sleep, base = WAYS[way]
        self.engine = engine
        self.lora = replace(lora, base=base)
        self.manager = ShardingManager(
            engine=engine,
            config=sglang_config(sleep=sleep, **changes),
            device=CPU,
            control=ControlGroup(timeout_s=150.0),
            lora=self.lora if self.lora.sends_adapters else None,
        )
        self.trainer = build_lora(folder, lora=self.lora)
        self.manager.attach_policy(self.trainer)
        self.version = 0

    def sample(self, sampling: SamplingParams = SAMPLING) -> list[Response]:
        with self.manager.rollout_phase() as serving:
            assert serving is self.engine
            return serving.generate(PROMPTS, sampling)

    def apart_nats(self, responses: list[Response], *, temperature: float) -> float:
        """The largest distance of these responses' log-probs from the trainer's."""
        rollouts = assemble_rollouts(PROMPTS, responses, policy_version=self.version)
        scored = self.trainer.compute_logprobs(rollouts, temperature=temperature)
        apart = scored.logprobs_BL.values() - rollouts.sampler_logprobs_BL.values()
        mask = rollouts.response_mask_BL.values()
        assert torch.isfinite(apart[mask]).all()
        return float(apart[mask].abs().max())

    def mismatch_nats(self) -> float:
        """Sample and score."""
        return self.apart_nats(self.sample(), temperature=SAMPLING.temperature)

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
