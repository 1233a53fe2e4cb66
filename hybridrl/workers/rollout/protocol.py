"""What a rollout engine offers: sampling for workers, edges of its life for the sharding manager.

Only ``workers/sharding`` calls pause, drain, release, resume and continue_generation; a test reads
the syntax tree and holds everyone to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.errors import first_of
from hybridrl.metrics import Metrics
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket


class MemoryTag(Enum):
    """Parts of an engine's memory that are released and resumed separately (SGLang's tags)."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; the same for every prompt of a call."""

    num_responses_per_prompt: int
    """Responses G per prompt, >= 1."""

    max_response_tokens: int
    """Hard stop, in tokens."""

    temperature: float
    """Divides the logits; 0 is greedy, with log-probs taken at temperature 1."""

    top_p: float = 1.0
    """Nucleus, in (0, 1]."""

    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""

    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these; the stop token belongs to the response."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled continuation of a prompt."""

    token_ids: Tensor
    """int64 [n], 0 <= n <= max_response_tokens, with the stop token if one ended it."""

    logprobs: Tensor
    """float32 [n] nats, after the temperature and before top-p and top-k, whatever the engine: what
    the trainer computes of the same tokens."""

    is_truncated: bool
    """True if the length limit ended it."""

    routed_experts_LJK: Tensor | None = None
    """int32 [prompt + response - 1, layers, experts a token], which experts each token went
    through; the last token was never an input. None unless ``rollout.routed_experts``."""


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """One tensor under the ``weights`` tag."""

    name: str
    """Hugging Face name, that buffers have too; of an adapter's tensor the name in its file."""

    num_bytes: int

    is_buffer: bool
    """True for state that no trainer sends (rotary frequencies, scales).

    Must be backed up to survive a release.
    """


class WeightSender(Protocol):
    """One rank's end of the weight stream into an engine.

    Every rank that shares an engine stages every bucket: rank i of a server reads the bytes that
    rank i staged, on the device that both share. The rank with the engine has the bucket loaded.
    """

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Make a bucket ready; it stays so until the next one but one.

        Its tensors may be reused, unless it is staged by reference.

        Raises:
            EngineError: a name or shape that the engine does not have, or no room for it.
        """
        ...

    def release_buffers(self) -> None:
        """Let go of all buffers; the stream has ended, well or not. Idempotent."""
        ...


def mismatch(names: Sequence[str]) -> str:
    """Say that these weights did not arrive as they were sent."""
    return (
        f"{len(names)} weights of the rollout engine are not the trainer's after the first sync: "
        f"{first_of(names)}; every response would be sampled by another model. "
        "See that trainer and engine load the same model.path, and try rollout.transport=disk"
    )


class RolloutEngine(WeightSender, Protocol):
    """One sampling engine, life cycle as in ``workers/sharding/lifecycle.py``.

    Starts with every part of its memory resident and weights that are not to be trusted
    (BOOT counts every tensor as lost). Implementations check nothing about order: the life cycle
    does.
    """

    frees_memory: bool
    """False where release and resume are answered and nothing moves (SGLang on a CPU)."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> list[Response]:
        """Sample; returns P * G responses, siblings adjacent, in prompt order."""
        ...

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List all tensors under the ``weights`` tag."""
        ...

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Load a bucket of full tensors; from any one thread at a time. All or nothing.

        Args:
            staged: this rank's own.
            handles: what all ranks of the engine staged for this bucket, in rank order.

        Raises:
            EngineError: a name or shape that the engine does not have; or the server refuses the
                bucket, or is gone.
            DeadlineError: the server does not answer.
        """
        ...

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the whole of an adapter, by the names of its file; they may be reused afterwards.

        Comes after the base weights, and after ``unload_adapter``. From here on every generate call
        uses the adapter; an engine built for adapters refuses to generate without one.

        Raises:
            EngineError: no tensor, a name that is not an adapter's, or none that the engine has.
        """
        ...

    def unload_adapter(self) -> None:
        """Forget the adapter, if there is one. Idempotent."""
        ...

    def finish_update(self, *, version: int) -> None:
        """All buckets of a sync have arrived.

        Derived state is rebuilt, caches of old weights are dropped.
        """
        ...

    def load_reference_weights(self, folder: Path) -> None:
        """Note what the weights in the safetensors of ``folder`` are in this engine; forget them.

        Whatever the weights were before, they are worthless afterwards, until they are sent.

        Raises:
            EngineError: the files cannot be loaded.
        """
        ...

    def verify_weights(self) -> None:
        """Compare the sent weights bitwise with those of ``load_reference_weights``; drop these.

        Raises:
            LedgerError: names the tensors that differ, by the engine's names.
        """
        ...

    def pause(self) -> None:
        """Admit no new request. Idempotent."""
        ...

    def drain(self, *, timeout_s: float) -> int:
        """Wait until nothing is running, abort what is left at the deadline.

        Returns the number aborted.
        """
        ...

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        """Free a part's memory.

        ``backup`` names the weights to copy to the host first; others are lost.
        """
        ...

    def resume(self, part: MemoryTag) -> None:
        """Allocate a part again and refill what was backed up."""
        ...

    def continue_generation(self) -> None:
        """Admit requests again."""
        ...

    def resident_bytes(self, part: MemoryTag) -> int:
        """Return the bytes that this part holds on the device now (measured, not remembered).

        An engine in another process says what it counts, which may be more than it can give back.
        """
        ...

    def take_metrics(self) -> Metrics:
        """Return what the generate calls since the last time did, and start anew."""
        ...

    def restart(self) -> None:
        """Throw everything away and boot again: the only way out of BROKEN."""
        ...

    def shutdown(self) -> None:
        """End for good; idempotent."""
        ...
