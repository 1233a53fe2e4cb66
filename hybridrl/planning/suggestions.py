"""The one key to change when a plan does not fit: the formula is applied to each candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig, with_value
from hybridrl.errors import ConfigError, instruction
from hybridrl.planning.fit import Fit, find_fits, format_bytes

_FEWEST_TOKENS = 128  # tokens of a chunk of logits: smaller chunks save little
_MOST_RANKS_PER_NODE = 8  # GPUs of a usual machine
_MOST_NODES = 128


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One override and its effect on the peak."""

    key: str
    value: bool | float | str
    price: int
    """Its cost in time or precision, to compare suggestions: 1 is hardly noticeable."""

    config: ExperimentConfig
    """The configuration with the override."""

    @property
    def override(self) -> str:
        """The override as typed on the command line."""
        is_flag = isinstance(self.value, bool)
        return f"{self.key}={str(self.value).lower() if is_flag else self.value}"


def find_misfits(config: ExperimentConfig) -> list[ConfigError]:
    """Return an error for each memory that is too small; it names the one key to change.

    Raises:
        ModelError: a model's config.json cannot be read, or is of an unknown family.
    """
    return [_refuse(config, fit) for fit in find_fits(config) if fit.excess]


def _refuse(config: ExperimentConfig, misfit: Fit) -> ConfigError:
    rule = f"{misfit.need}, {format_bytes(misfit.excess)} more than there is"
    given = attrgetter(misfit.key)(config)
    if (change := suggest_override(config, misfit)) is None:
        return ConfigError(misfit.key, given, rule, "change several keys: no single one saves any")
    suggestion, fit = change
    if fit.excess:
        fix = f"change several keys: {suggestion.override} saves most, and leaves "
        return ConfigError(misfit.key, given, rule, f"{fix}{format_bytes(fit.excess)} too much")
    left = format_bytes((fit.capacity or 0) - fit.num_bytes)
    fix = f"{instruction((suggestion.override,))}, which leaves {left}"
    return ConfigError(misfit.key, given, rule, fix, remedies=((suggestion.override,),))


def suggest_override(config: ExperimentConfig, misfit: Fit) -> tuple[Suggestion, Fit] | None:
    """Return the cheapest single override with which a memory suffices; of equal ones the first.

    It breaks no rule of the configuration, and fills no other memory. Without such an override the
    one that saves most; None if none saves any.

    Args:
        config: of a run that does not fit.
        misfit: one of its memories that is too small.
    """
    best, least = None, misfit.excess
    num_violations = len(find_violations(config))
    others = {fit.name for fit in find_fits(config) if fit.excess} - {misfit.name}
    for suggestion in sorted(suggestions(config), key=attrgetter("price")):
        fits = {fit.name: fit for fit in find_fits(suggestion.config)}
        lacking = {name for name, fit in fits.items() if fit.excess}
        if lacking <= others and len(find_violations(suggestion.config)) <= num_violations:
            return suggestion, fits[misfit.name]
        if fits[misfit.name].excess < least:
            best, least = (suggestion, fits[misfit.name]), fits[misfit.name].excess
    return best


def suggestions(config: ExperimentConfig) -> Iterator[Suggestion]:
    """Yield single overrides that save memory, with their prices.

    Each halving of a size costs 1, and more exchanges between ranks 1 or 2. Checkpointing costs 3
    (a third more time), a change of precision 4, and each doubling of ranks 6 or 7: they cost
    money. For parallel sizes on the same ranks each doubling costs 2 if activations are exchanged,
    and 3 if a pipeline has bubbles. A twentieth of the device for the KV cache costs 1, training
    state that moves less between device and host 4, and no checkpoints 8.
    """
    for key, value, price in (*_values(config), *_sizes(config)):
        if attrgetter(key)(config) != value:
            yield Suggestion(key, value, price, with_value(config, key, value))


def _values(config: ExperimentConfig) -> Iterator[tuple[str, bool | float | str, int]]:
    is_cuda = config.cluster.device == "cuda"
    has_critic = config.has_critic and not config.has_critic_pool
    for is_offered, key, value, price in (
        (True, "rollout.sleep", True, 1),
        (is_cuda, "rollout.sleep", False, 4),
        (is_cuda, "actor.fsdp2.cpu_offload", False, 4),
        (is_cuda, "checkpoint.every_num_steps", 0, 8),
        (is_cuda, "rollout.dtype", "bfloat16", 4),
        (is_cuda, "actor.compute_dtype", "bfloat16", 4),
        (True, "actor.gradient_checkpointing", True, 3),
        (True, "actor.fsdp2.reduce_gradients", "every_microbatch", 1),
        (True, "actor.fsdp2.reshard_after_forward", True, 2),
        (has_critic, "critic.gradient_checkpointing", True, 3),
        (bool(config.megatron_worlds), "megatron.sequence_parallel", True, 1),
    ):
        if is_offered:
            yield key, value, price
    fraction = config.rollout.memory_fraction
    for twentieths in range(1, 20 if is_cuda and config.rollout.engine == "sglang" else 1):
        price = math.ceil(abs(twentieths - 20 * fraction))
        yield "rollout.memory_fraction", twentieths / 20, price


def _sizes(config: ExperimentConfig) -> Iterator[tuple[str, int, int]]:
    """Yield halvings down to a limit, and doublings up to one."""
    cluster, row_tokens = config.cluster, config.max_row_tokens
    has_megatron = bool(config.megatron_worlds)
    has_critic = config.has_critic and not config.has_critic_pool
    is_cuda = cluster.device == "cuda"
    for is_offered, key, at_least in (
        (True, "rollout.num_slots", 1),
        (True, "actor.max_tokens_per_microbatch", row_tokens),
        (True, "actor.logprob_chunk_tokens", _FEWEST_TOKENS),
        (has_critic, "critic.max_tokens_per_microbatch", row_tokens),
    ):
        number: int = attrgetter(key)(config)
        for times in range(1, number.bit_length() if is_offered else 1):
            if number >> times >= at_least:
                yield key, number >> times, times
    for is_offered, key, at_most, price in (  # tensor-parallel ranks stay within a node
        (is_cuda, "rollout.tensor_parallel_size", cluster.num_ranks_per_node, 2),
        (has_megatron, "megatron.tensor_parallel_size", cluster.num_ranks_per_node, 2),
        (has_megatron, "megatron.expert_parallel_size", cluster.num_ranks, 2),
        (has_megatron, "megatron.pipeline_parallel_size", cluster.num_ranks, 3),
        (is_cuda, "cluster.num_ranks_per_node", _MOST_RANKS_PER_NODE, 6),
        (is_cuda and cluster.ray_address is not None, "cluster.num_nodes", _MOST_NODES, 7),
    ):
        number = attrgetter(key)(config)
        for times in range(1, 8 if is_offered else 1):
            if number << times <= at_most:
                yield key, number << times, price * times
