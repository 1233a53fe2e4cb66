"""Errors of memories that are too small: each names the key to change first.

That is a direction: only another plan shows whether it suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from operator import attrgetter

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, instruction
from hybridrl.planning.fit import DEVICE, HOST, SHARE, Fit, format_bytes
from hybridrl.planning.plan import MemoryItem, MemoryKind

_MOST = 0.95  # of a device for an engine
_FEWEST_TOKENS = 128  # tokens of a chunk of logits: smaller chunks save little
_OF_ENGINE = ("KV cache", "rollout weights", "SGLang's graphs")
_OF_TRAINING = ("optimizer", "actor weights", "gradients")
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
        is_on_host = misfit.key == HOST
        items = sorted(
            (item for item in misfit.phase.items if (item.kind is MemoryKind.HOST) == is_on_host),
            key=attrgetter("num_bytes"),
            reverse=True,
        )
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
    actor, rollout = config.actor, config.rollout
    is_megatron, is_on_device = bool(config.megatron_worlds), misfit.key == DEVICE
    fraction = rollout.memory_fraction - misfit.excess / max(1, misfit.capacity or 1)
    tokens = max(config.max_row_tokens, actor.max_tokens_per_microbatch // 2)
    chunk = actor.logprob_chunk_tokens // 2
    moved = is_megatron or actor.fsdp2.cpu_offload
    for uses, helps, override in (
        (("KV cache",), fraction > 0, f"{SHARE}={math.floor(100 * fraction) / 100}"),
        (_OF_ENGINE, not rollout.sleep, "rollout.sleep=true"),
        (("logits",), chunk >= _FEWEST_TOKENS, f"actor.logprob_chunk_tokens={chunk}"),
        (
            ("activations",),
            not actor.gradient_checkpointing,
            "actor.gradient_checkpointing=true",
        ),
        (
            ("activations",),
            tokens < actor.max_tokens_per_microbatch,
            f"actor.max_tokens_per_microbatch={tokens}",
        ),
        (
            ("activations",),
            is_megatron and not config.megatron.sequence_parallel,
            "megatron.sequence_parallel=true",
        ),
        (
            ("gathered weights",),
            not actor.fsdp2.reshard_after_forward,
            "actor.fsdp2.reshard_after_forward=true",
        ),
        (
            ("gradients",),
            actor.fsdp2.reduce_gradients == "last_microbatch",
            "actor.fsdp2.reduce_gradients=every_microbatch",
        ),
        (_OF_TRAINING, is_on_device and not moved, "actor.fsdp2.cpu_offload=true"),
        (("checkpoint",), True, "checkpoint.every_num_steps=0"),
        (("offloaded training state",), rollout.sleep, "rollout.sleep=false"),
    ):
        if use in uses and helps:
            yield override
