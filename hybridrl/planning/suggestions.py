"""The one key to change when a plan does not fit: the formula is applied to each candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig, with_value
from hybridrl.planning.memory import plan_memory

_FEWEST_TOKENS = 128  # tokens of a chunk of logits: smaller chunks save little
_MOST_RANKS_PER_NODE = 8  # GPUs of a usual machine
_MOST_NODES = 128


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One override and its effect on the peak."""

    key: str
    value: bool | int | str
    price: int
    """Its cost in time or precision, to compare suggestions: 1 is hardly noticeable."""

    config: ExperimentConfig
    """The configuration with the override."""

    @property
    def override(self) -> str:
        """The override as typed on the command line."""
        return f"{self.key}={str(self.value).lower() if self.value is True else self.value}"

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank with the override."""
        plan = plan_memory(self.config)
        return plan.peak_bytes(plan.fullest)


def suggest_override(config: ExperimentConfig, *, capacity_bytes: int) -> Suggestion | None:
    """Return the cheapest single override with which a rank fits; of equal ones the first.

    Overrides that break a rule of the configuration are skipped.

    Args:
        config: a configuration that does not fit.
        capacity_bytes: memory of one rank's device.
    """
    num_violations = len(find_violations(config))
    for suggestion in sorted(suggestions(config), key=attrgetter("price")):
        fits = suggestion.peak_bytes <= capacity_bytes
        if fits and len(find_violations(suggestion.config)) <= num_violations:
            return suggestion
    return None


def largest_saving(config: ExperimentConfig) -> Suggestion | None:
    """Return the override that lowers the peak most; None if none lowers it."""
    plan = plan_memory(config)
    lowest = min(suggestions(config), key=attrgetter("peak_bytes"), default=None)
    return lowest if lowest and lowest.peak_bytes < plan.peak_bytes(plan.fullest) else None


def suggestions(config: ExperimentConfig) -> Iterator[Suggestion]:
    """Yield single overrides that save memory, with their prices.

    Each halving of a size costs 1, and more exchanges between ranks 1 or 2. Checkpointing costs 3
    (a third more time), a change of precision 4, and each doubling of ranks 6 or 7: they cost
    money. For parallel sizes on the same ranks each doubling costs 2 if activations are exchanged,
    and 3 if a pipeline has bubbles.
    """
    for key, value, price in (*_values(config), *_sizes(config)):
        if attrgetter(key)(config) != value:
            yield Suggestion(key, value, price, with_value(config, key, value))


def _values(config: ExperimentConfig) -> Iterator[tuple[str, bool | int | str, int]]:
    is_cuda = config.cluster.device == "cuda"
    has_critic = config.has_critic and not config.has_critic_pool
    for is_offered, key, value, price in (
        (True, "rollout.sleep", True, 1),
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
