"""Bytes per second of each transport of weights into a real SGLang server, against a memcpy.

    python -m benchmarks.weight_sync [--bucket-mib 64] [--rounds 5]

Needs SGLang; a random Qwen3 of 96 M parameters in float32 is made on the spot. Every round sends
all weights once by each transport, and copies the same bytes once within this process. The last
line is the cost of a bucket that holds next to nothing: HTTP, the scheduler, one small copy.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.sides.measure import in_turns, print_head, print_row, seconds_of
from hybridrl.config.load import load_config
from hybridrl.config.rollout import RolloutConfig
from hybridrl.main import compose
from hybridrl.workers.rollout.sglang.arguments import ServingSpec
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.transports import build_transport
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import stream_weights

Transport = Literal["shared", "disk"]
Precision = Literal["float32", "bfloat16"]
TRANSPORTS: tuple[Transport, ...] = ("shared", "disk")
NUM_SMALL_BUCKETS = 50
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as root:
        folder = make_model(Path(root))
        engine = start(folder)
        try:
            measure(engine, load_file(folder / "model.safetensors"), arguments)
        finally:
            engine.shutdown()


def make_model(root: Path) -> Path:
    shape = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(root / "model")
    return root / "model"


def rollout_config() -> RolloutConfig:
    """Return the section as ``rollout=sglang`` has it."""
    return load_config(compose(["rollout=sglang", "trainer.run_dir=unused"])).rollout


def start(folder: Path, *, dtype: Precision = "float32") -> SGLangEngine:
    """Start a small server, paused, with made-up weights."""
    rollout = rollout_config()
    engine = SGLangEngine(
        ServingSpec(
            model_folder=folder,
            rollout=replace(rollout, num_slots=4, dtype=dtype),
            lora=None,
            max_context_tokens=64,
            seed=0,
            device="cpu",
        ),
        variables={},
    )
    engine.pause()
    engine.drain(timeout_s=10.0)
    return engine


def measure(
    engine: SGLangEngine, weights: dict[str, Tensor], arguments: argparse.Namespace
) -> None:
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    bucket_mib, sent_s = arguments.bucket_mib, dict[str, list[float]]()

    def send_by(transport: Transport) -> None:
        use(engine, transport)
        took = seconds_of(lambda: send(engine, weights, bucket_bytes=bucket_mib * 2**20))
        sent_s.setdefault(transport, []).append(took)

    ways: dict[str, Callable[[], object]] = {t: partial(send_by, t) for t in TRANSPORTS}
    memcpy = partial(lambda: [tensor.clone() for tensor in weights.values()])
    taken = in_turns({"memcpy": memcpy, **ways}, arguments.rounds)
    medians = {"memcpy": statistics.median(taken["memcpy"])}
    medians |= {name: statistics.median(seconds[1:]) for name, seconds in sent_s.items()}
    tiny_ms: dict[str, str] = {
        name: f"{1e3 * tiny_bucket(engine, name, weights):.1f}" for name in TRANSPORTS
    }
    print(f"{num_bytes / 2**20:.0f} MiB in buckets of {bucket_mib} MiB, median of ", end="")
    print(f"{arguments.rounds} rounds after one to warm up\n")
    print_head("transport", "seconds", "GB/s", "times memcpy", "ms a tiny bucket")
    for name, seconds in medians.items():
        ratio = f"{seconds / medians['memcpy']:.1f}"
        rate = f"{num_bytes / seconds / 1e9:.2f}"
        print_row(name, f"{seconds:.3f}", rate, ratio, tiny_ms.get(name, ""))


def use(engine: SGLangEngine, transport: Transport) -> None:
    """Let weights take another way from here on."""
    engine.transport.forget()
    engine.transport = build_transport(
        rollout_config(), device=CPU, is_sender=True, from_disk=transport == "disk"
    )


def send(engine: SGLangEngine, weights: dict[str, Tensor], *, bucket_bytes: int) -> None:
    control = ControlGroup(timeout_s=60.0)
    report = stream_weights(
        iter(weights.items()),
        engine.load,
        sender=engine,
        bucket_bytes=bucket_bytes,
        control=control,
    )
    if report.failures:
        raise RuntimeError(report.failures[0])
    engine.finish_update(version=0)


def tiny_bucket(engine: SGLangEngine, transport: Transport, weights: dict[str, Tensor]) -> float:
    """Return the seconds that a bucket of one norm takes, on disk its file alone."""
    use(engine, transport)
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    send(engine, norm, bucket_bytes=1)

    def send_one() -> None:
        staged = engine.stage(list(norm.items()))
        engine.load(staged, [staged.make_handle()])

    took = [seconds_of(send_one) for _ in range(NUM_SMALL_BUCKETS)]
    engine.release_buffers()
    engine.finish_update(version=0)
    return statistics.median(took)


if __name__ == "__main__":
    main()
