"""Engines on real SGLang servers, and Hugging Face's answers to the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.batch import PromptBatch
from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import PhaseError
from hybridrl.sampler import Sample
from hybridrl.workers.rollout.buckets import Bucket
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.arguments import ServerSpec
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.workers.rollout.engines import rollout_config

MAX_CONTEXT_TOKENS = 96


def sglang_config(**changes: object) -> RolloutConfig:
    """A small server; idle, it leaves its core to the tests."""
    common: dict[str, object] = {
        "engine": "sglang",
        "start_timeout_s": 150.0,  # 25 s of CPU, on cores that are shared
        "request_timeout_s": 60.0,
        "stage_timeout_s": 30.0,
    }
    return replace(rollout_config(), **(common | changes))  # type: ignore[arg-type]


def server_spec(folder: Path, **changes: object) -> ServerSpec:
    """What a server of the tests serves; ``changes`` are keys of the rollout section."""
    return ServerSpec(
        model_folder=folder,
        rollout=sglang_config(**changes),
        lora=None,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        seed=0,
        device="cpu",
    )


@contextmanager
def running_engine(
    spec: ServerSpec, *, variables: Mapping[str, str] | None = None
) -> Iterator[SGLangEngine]:
    """An engine as it boots; its server is gone afterwards."""
    engine = SGLangEngine(spec, variables=variables or {})
    try:
        yield engine
    finally:
        engine.shutdown()


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def send(engine: SGLangEngine, bucket: Bucket) -> None:
    """Load one bucket."""
    staged = engine.stage(bucket)
    try:
        engine.load(staged, [staged.handle])
    finally:
        engine.release_buffers()


def sync(engine: SGLangEngine, weights: Mapping[str, Tensor], *, version: int) -> None:
    """Send all weights in two buckets, in the order of the life cycle without sleep."""
    engine.pause()
    engine.drain(timeout_s=10.0)
    tensors = list(weights.items())
    half = len(tensors) // 2
    for bucket in (tensors[:half], tensors[half:]):
        send(engine, bucket)
    engine.finish_update(version=version)
    engine.continue_generation()


def make_ready(engine: SGLangEngine, folder: Path) -> None:
    """Bring an engine that serves many tests back to a known state: awake, with these weights."""
    for part in MemoryTag:
        with suppress(PhaseError):  # it is resident
            engine.resume(part)
    sync(engine, weights_of(folder), version=0)


def greedy_of_hugging_face(folder: Path, prompts: PromptBatch, *, num_tokens: int) -> list[Sample]:
    """Continue each prompt by itself with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    responses = []
    for prompt in prompts.token_ids_PL.unbind():
        row = prompt[None]
        logprobs: list[Tensor] = []
        for _ in range(num_tokens):
            with torch.no_grad():
                last = torch.log_softmax(model(row).logits[0, -1].float(), dim=-1)
            logprobs.append(last.max())
            row = torch.cat([row, last.argmax()[None, None]], dim=1)
        tokens = row[0, len(prompt) :]
        responses.append(Sample(tokens, torch.stack(logprobs), "length", weight_version=0))
    return responses
