"""In the place of ``torch.cuda``: streams and events of a device whose work is always done."""

from __future__ import annotations

from types import SimpleNamespace

import torch

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
