"""Small embedded engines with real weights, and prompts for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.batch import PromptBatch, jagged, objects
from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.images import Images
from hybridrl.sampler import RequestParams, Sample, SampleRequest, SamplingParams, Scoring
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import RolloutEngine

CPU = torch.device("cpu")
VOCAB_SIZE = 64


def rollout_config(*, num_slots: int = 8, dtype: str = "float32") -> RolloutConfig:
    return RolloutConfig(
        engine="hf",
        num_responses_per_prompt=2,
        oversample=1.0,
        max_response_tokens=8,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        sampling_masks=False,
        num_slots=num_slots,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        tensor_parallel_size=1,
        sleep=True,
        backup_weights="ledger",
        verify_weights="never",
        canary_max_drift_nats=None,
        bucket_mib=0,
        drain_timeout_s=10.0,
        stage_timeout_s=10.0,
        engine_args={},
        memory_fraction=0.85,
        transport="auto",
        start_timeout_s=60.0,
        request_timeout_s=60.0,
        dump=False,
        replay=None,
    )


def allocate_on_host(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def unsynced_engine(
    folder: Path,
    *,
    max_context_tokens: int = 32,
    config: RolloutConfig | None = None,
    lora: LoraConfig | None = None,
    **keys: Any,
) -> HFRolloutEngine:
    """An engine as it boots: no weights yet; ``keys`` are those of ``rollout_config``."""
    config = config or rollout_config(**keys)
    return HFRolloutEngine(
        folder, config=config, max_context_tokens=max_context_tokens, device=CPU, lora=lora
    )


def stop(engine: RolloutEngine) -> int:
    """Let nothing run; the number of requests that did not end in time."""
    engine.pause()
    return engine.drain(timeout_s=30.0)


def load(engine: HFRolloutEngine, tensors: Sequence[tuple[str, Tensor]]) -> None:
    engine.load(engine.stage(tensors), [])


def send_weights(engine: HFRolloutEngine, folder: Path) -> None:
    load(engine, list(load_file(folder / "model.safetensors").items()))
    engine.finish_update(version=0)


def ready_engine(folder: Path, **options: Any) -> HFRolloutEngine:
    engine = unsynced_engine(folder, **options)
    send_weights(engine, folder)
    return engine


def make_prompts(lengths: Sequence[int]) -> PromptBatch:
    """Random prompts; each depends on its length and place alone."""
    rows = []
    for place, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(place)
        rows.append(torch.randint(0, VOCAB_SIZE, (length,), generator=generator))
    return prompt_batch(rows, [100 + place for place in range(len(rows))])


def prompt_batch(
    rows: Sequence[Tensor], seeds: Sequence[int], images: Sequence[Images] | None = None
) -> PromptBatch:
    return PromptBatch(
        token_ids_PL=jagged(rows),
        prompt_index_P=torch.arange(len(rows)),
        seed_P=torch.tensor(seeds),
        images_P=None if images is None else objects(images),
        batch_size=[len(rows)],
    )


def sampling_params(
    *,
    group: int = 3,
    tokens: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[int, ...] = (),
) -> SamplingParams:
    return SamplingParams(group, tokens, temperature, top_p, top_k, stop)


def scoring_request(
    prompt: Tensor, sample: Sample, *, num_likeliest: int, temperature: float = 0.7
) -> SampleRequest:
    """Ask what a model says of a response."""
    params = RequestParams(max_new_tokens=1, temperature=temperature)
    scoring = Scoring(len(prompt), num_likeliest)
    tokens = torch.cat([prompt, sample.token_ids])
    return SampleRequest(tokens, params, (0,), scoring=scoring)


def tokens_of(responses: Sequence[Sample]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


def greedy_of_hugging_face(folder: Path, prompts: PromptBatch, *, num_tokens: int) -> list[Sample]:
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


def assert_samples(
    found: Sequence[Sample], expected: Sequence[Sample], *, atol: float = 2e-4
) -> None:
    """The same tokens, and log-probs but for rounding, of the first token as of the others."""
    assert tokens_of(found) == tokens_of(expected)
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]
    for sample, other in zip(found, expected, strict=True):
        torch.testing.assert_close(sample.logprobs, other.logprobs, atol=atol, rtol=0)
