"""One rank as a worker has it: a LoRA trainer and a real SGLang server that share a device."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hybridrl.config.model import LoraConfig
from hybridrl.errors import PhaseError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import sglang_config
from tests.workers.device import Journalling, LoraDevice
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.train.lora_engines import LORA

PROMPTS = make_prompts((4, 9, 40))
SAMPLING = replace(sampling_params(group=4, tokens=8), temperature=0.7)
GREEDY = sampling_params(group=1, tokens=8, temperature=0.0)


class ForgetfulEngine(Journalling, SGLangEngine):
    """Writes down what reaches it, and loses on a CPU what a release loses on a GPU."""

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        super().release(part, backup=backup)
        if part is MemoryTag.WEIGHTS and not backup:
            self.scramble()

    def scramble(self) -> None:
        self._server.require_success("/weights_checker", action="reset_tensors")


def wake_up(engine: SGLangEngine) -> None:
    """Bring an engine that serves many tests to a known state: all resident, no adapter."""
    for part in MemoryTag:
        with suppress(PhaseError):  # it is resident
            engine.resume(part)
    engine.unload_adapter()
    engine.continue_generation()


class ServedDevice(LoraDevice):
    def __init__(
        self,
        engine: SGLangEngine,
        folder: Path,
        way: str,
        *,
        lora: LoraConfig = LORA,
        **changes: object,
    ) -> None:
        super().__init__(
            lambda *_: engine,
            folder,
            way,
            config=sglang_config(**changes),
            lora=lora,
            prompts=PROMPTS,
            sampling=SAMPLING,
        )
