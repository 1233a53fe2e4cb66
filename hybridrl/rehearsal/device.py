"""A GPU without a GPU: who has its bytes for what, and its streams, whose work is always done."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType, SimpleNamespace

import torch

_PLACES = {
    "/torch/distributed/fsdp/": "gathered weights",
    "/torch/optim/": "optimizer step",
    "/hybridrl/models/load.py": "weights on their way in",
    "/hybridrl/models/logprobs.py": "logits",
    "/hybridrl/workers/rollout/weight_folder.py": "file of weights",
    "/hybridrl/workers/train/export.py": "file of weights",
    "/hybridrl/workers/train/megatron/export.py": "weight stream",
    "/hybridrl/workers/rollout/": "weight stream",
    "/hybridrl/workers/train/shards.py:full_tensor": "weight stream",
    "/hybridrl/workers/train/offload.py:copy_to_host": "checkpoint",
    "/hybridrl/workers/train/offload.py:__init__": "offloaded training state",
    "/megatron/core/distributed/param_and_grad_buffer": "gradients",
    "/megatron/core/optimizer/": "optimizer step",
}
"""Uses of memory, by the part of ``FILE:FUNCTION`` that made it; else ``activations``."""

_FRAMES = 40
"""Python frames that are searched for such a file."""


@dataclass(eq=False, slots=True)
class Block:
    """A storage that lives, or lived."""

    num_bytes: int
    device: torch.device
    made_for: str
    """The use that its maker makes of memory."""

    use: str = ""
    """Its use; ``FakeGpu.name`` gives storages that last their final names."""

    def __post_init__(self) -> None:
        self.use = self.use or self.made_for


class Memory:
    """The bytes of fake storages on one kind of device, and who had them at the fullest moment."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak = 0
        self._before: Counter[Block] = Counter()
        self._changes: list[tuple[Block, int]] = []

    def change(self, block: Block, num_bytes: int) -> None:
        """Count bytes that a block takes, or gives back if negative."""
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)
        self._changes.append((block, num_bytes))

    def reset_peak(self) -> None:
        """Begin to look for the fullest moment from here on."""
        for block, num_bytes in self._changes:
            self._before[block] += num_bytes
        self._before = +self._before
        self._changes = []
        self.peak = self.allocated

    def fullest_moments(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each use at fullest moments since ``reset_peak``.

        One for each kind of memory that was the last to be taken: with more layers another of them
        may be the fullest of all.
        """
        uses: Counter[str] = Counter()
        for block, num_bytes in self._before.items():
            uses[block.use] += num_bytes
        held = sum(uses.values())
        most = {"": held}
        moments = {"": dict(uses)}
        for block, num_bytes in self._changes:
            uses[block.use] += num_bytes
            held += num_bytes
            if num_bytes > 0 and held > most.get(block.made_for, 0):
                most[block.made_for], moments[block.made_for] = held, dict(uses)
        return moments


def use_of_caller() -> str:
    """Return the use of the memory that the caller makes, by the files on the stack."""
    frame: FrameType | None = sys._getframe(2)
    num_frames = 0
    while frame is not None and num_frames < _FRAMES:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        for part, use in _PLACES.items():
            if part in place:
                return use
        frame, num_frames = frame.f_back, num_frames + 1
    return "activations"


GPU = torch.device("cuda", 0)

_SEEDS = ("manual_seed", "manual_seed_all", "set_rng_state_all")


def answers(num_bytes: int, num_devices: int) -> dict[str, object]:
    """Return answers of functions of ``torch.cuda`` that do not depend on arguments."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=num_bytes,
        multi_processor_count=132,
    )
    state = torch.Generator().get_state()
    nothing = ("set_device", "ipc_collect", "init", "_lazy_init", "set_rng_state", *_SEEDS)
    return {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "current_device": 0,
        "device_count": num_devices,
        "current_stream": Stream(),
        "default_stream": Stream(),
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_rng_state": state,
        "get_rng_state_all": [state] * num_devices,
        **dict.fromkeys(nothing),
    }


class Signal:
    """A CUDA event: of a stream whose work is always done."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take the arguments of ``torch.cuda.Event``."""

    def record(self, *_: object) -> None:
        """Mark a point of a stream."""

    def wait(self, *_: object) -> None:
        """Let a stream wait."""

    def query(self) -> bool:
        """Whether it is over."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""

    def elapsed_time(self, _: object) -> float:
        """Return milliseconds: none."""
        return 0.0


class Stream:
    """A CUDA stream."""

    device = GPU
    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *_: object, **__: object) -> None:
        """Take the arguments of ``torch.cuda.Stream``."""

    def wait_stream(self, _: object) -> None:
        """Wait for the work of another stream."""

    def wait_event(self, _: object) -> None:
        """Wait for an event."""

    def record_event(self, event: Signal | None = None) -> Signal:
        """Mark a point of this stream."""
        return event or Signal()

    def query(self) -> bool:
        """Whether its work is done."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""
