from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.workers.rollout.protocol import WeightSender
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.transports import build_transport
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import Load, StreamReport, stream_weights
from tests.sglang.engines import sglang_config, weights_of
from tests.workers.rollout.engines import (
    assert_samples,
    greedy_of_hugging_face,
    make_prompts,
    sampling_params,
    stop,
)

PROMPTS = make_prompts((1, 7, 33))
GREEDY = sampling_params(group=1, tokens=8, temperature=0.0)
BUCKET_BYTES = 2**14
"""Several buckets of the tiny model."""


def use_transport(engine: SGLangEngine, transport: str) -> None:
    """Let a server that serves many tests get its weights by another way from here on."""
    engine.transport.forget()
    engine.transport = build_transport(
        sglang_config(), device=torch.device("cpu"), is_sender=True, from_disk=transport == "disk"
    )


def stream(
    engine: SGLangEngine | None,
    weights: Iterator[tuple[str, Tensor]],
    *,
    follower: WeightSender | None = None,
    load: Load | None = None,
    num_ranks: int = 1,
) -> StreamReport:
    """Send weights as ``FusedEngines`` does; a collective call."""
    control = ControlGroup(timeout_s=60.0)
    return stream_weights(
        weights,
        load or (None if engine is None else engine.load),
        sender=engine or follower,
        bucket_bytes=BUCKET_BYTES,
        control=control,
        ranks=range(num_ranks),
    )


def send_folder(engine: SGLangEngine, folder: Path, *, version: int) -> StreamReport:
    stop(engine)
    report = stream(engine, iter(weights_of(folder).items()))
    assert not report.failures
    engine.finish_update(version=version)
    engine.continue_generation()
    return report


def broken_off(folder: Path, *, after: int) -> Iterator[tuple[str, Tensor]]:
    """Weights whose gathering fails when ``after`` tensors were sent."""
    for number, item in enumerate(weights_of(folder).items()):
        if number == after:
            raise OSError("gathering failed")
        yield item


def assert_serves(engine: SGLangEngine, folder: Path) -> None:
    expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=8)
    found = engine.run(single_turn(PROMPTS, GREEDY))
    assert_samples(found, expected)
