"""What does not fit, and the key to change first: by what fills the memory most.

The advice is a direction and no promise: only another plan tells whether it suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from operator import attrgetter

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, instruction
from hybridrl.planning.fit import SHARE, Fit, format_bytes
from hybridrl.planning.plan import MemoryItem

_MOST = 0.95  # of a device for an engine
_FEWEST_TOKENS = 128  # tokens of a chunk of logits: smaller chunks save little
_MOST_ADVICE = "take more devices: raise cluster.num_ranks_per_node or cluster.num_nodes"


def find_misfits(config: ExperimentConfig, fits: Iterable[Fit]) -> list[ConfigError]:
    """Return an error for each memory that is too small; it names the key to change first."""
    return [
        ConfigError(
            fit.key,
            attrgetter(fit.key)(config),
            f"{fit.need}, {format_bytes(fit.excess)} more than there is",
            _advise(config, fit),
        )
        for fit in fits
        if fit.excess
    ]


def _advise(config: ExperimentConfig, misfit: Fit) -> str:
    if misfit.key == SHARE:
        return _raise_share(config, misfit)
    if misfit.phase is None:  # of a server: its cache is all that can be less
        items = [MemoryItem("KV cache", misfit.num_bytes)]
    else:
        items = sorted(misfit.phase.items, key=lambda item: item.num_bytes, reverse=True)
    for item in items:
        if override := next(_overrides(config, item.name, misfit), ""):
            size = format_bytes(item.num_bytes)
            return f"{instruction((override,))}: {item.name} of {size} fill most that can be less"
    return _MOST_ADVICE


def _raise_share(config: ExperimentConfig, misfit: Fit) -> str:
    fraction = config.rollout.memory_fraction * misfit.num_bytes / max(1, misfit.capacity or 1)
    if fraction <= _MOST:
        return instruction((f"{SHARE}={math.ceil(100 * fraction) / 100}",))
    size = 2 * config.rollout.tensor_parallel_size
    return instruction((f"rollout.tensor_parallel_size={size}",))


def _overrides(config: ExperimentConfig, use: str, misfit: Fit) -> Iterator[str]:
    """Yield what makes a use of memory smaller, the cheapest first."""
    actor, rollout, megatron = config.actor, config.rollout, bool(config.megatron_worlds)
    row_tokens = config.max_row_tokens
    if use == "KV cache" and misfit.capacity:
        fraction = rollout.memory_fraction - misfit.excess / misfit.capacity
        if fraction > 0:
            yield f"{SHARE}={math.floor(100 * fraction) / 100}"
    if use in ("KV cache", "rollout weights", "SGLang's graphs") and not rollout.sleep:
        yield "rollout.sleep=true"
    if use == "logits" and actor.logprob_chunk_tokens > _FEWEST_TOKENS:
        yield f"actor.logprob_chunk_tokens={actor.logprob_chunk_tokens // 2}"
    if use == "activations":
        if not actor.gradient_checkpointing:
            yield "actor.gradient_checkpointing=true"
        if actor.max_tokens_per_microbatch > row_tokens:
            half = max(row_tokens, actor.max_tokens_per_microbatch // 2)
            yield f"actor.max_tokens_per_microbatch={half}"
        if megatron and not config.megatron.sequence_parallel:
            yield "megatron.sequence_parallel=true"
    if use == "gathered weights" and not actor.fsdp2.reshard_after_forward:
        yield "actor.fsdp2.reshard_after_forward=true"
    if use == "gradients" and actor.fsdp2.reduce_gradients == "last_microbatch":
        yield "actor.fsdp2.reduce_gradients=every_microbatch"
    if use in ("optimizer", "actor weights", "gradients") and not megatron:
        if misfit.key == "cluster.device_memory_gib" and not actor.fsdp2.cpu_offload:
            yield "actor.fsdp2.cpu_offload=true"
    if use == "checkpoint":
        yield "checkpoint.every_num_steps=0"
    if use == "offloaded training state" and rollout.sleep:
        yield "rollout.sleep=false"
