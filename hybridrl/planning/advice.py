"""The one key to change when a plan does not fit, found by trying changes through the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.memory import plan_memory

_FEWEST_TOKENS = 128  # of a chunk of logits: smaller ones save nothing that counts
_MOST_RANKS_PER_NODE = 8  # GPUs of a usual machine
_MOST_NODES = 128


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One override and its effect on the peak."""

    key: str
    value: bool | int | str
    price: int
    """Its cost in time or precision, to compare suggestions: 1 is hardly noticed."""

    config: ExperimentConfig
    """The configuration with it."""

    @property
    def override(self) -> str:
        """As typed on the command line."""
        return f"{self.key}={str(self.value).lower() if self.value is True else self.value}"

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank with the override."""
        plan = plan_memory(self.config)
        return plan.peak_bytes(plan.fullest)


def suggest_override(config: ExperimentConfig, *, capacity_bytes: int) -> Suggestion | None:
    """Return the cheapest single override with which a rank fits; of equal ones the first.

    Overrides that break a rule of the configuration are passed over.

    Args:
        config: a configuration that does not fit.
        capacity_bytes: memory of one rank's device.
    """
    before = len(find_violations(config))
    fitting = (
        suggestion
        for suggestion in sorted(suggestions(config), key=attrgetter("price"))
        if suggestion.peak_bytes <= capacity_bytes
        and len(find_violations(suggestion.config)) <= before
    )
    return next(fitting, None)


def largest_saving(config: ExperimentConfig) -> Suggestion | None:
    """Return the override that lowers the peak most; None if none lowers it."""
    plan = plan_memory(config)
    lowest = min(suggestions(config), key=attrgetter("peak_bytes"), default=None)
    return lowest if lowest and lowest.peak_bytes < plan.peak_bytes(plan.fullest) else None


def suggestions(config: ExperimentConfig) -> Iterator[Suggestion]:
    """Yield single overrides that save memory, with their prices.

    Each halving of a size costs 1, more exchanges between ranks 1 or 2, checkpointing 3 (a third
    more time), a change of precision 4, and each doubling of ranks 6 or 7, because nobody can
    conjure GPUs. Of parallel sizes on the same ranks each doubling costs 2 where activations are
    exchanged, and 3 where a pipeline has bubbles.
    """
    for key, value, price in _candidates(config):
        if attrgetter(key)(config) != value:
            yield Suggestion(key, value, price, _with_value(config, key, value))


def _candidates(config: ExperimentConfig) -> Iterator[tuple[str, bool | int | str, int]]:
    cluster, row_tokens = config.cluster, config.max_row_tokens
    is_cuda = cluster.device == "cuda"
    yield "rollout.sleep", True, 1
    yield from _halvings(config, "rollout.num_slots", at_least=1)
    if is_cuda:
        yield "rollout.dtype", "bfloat16", 4
        yield "actor.compute_dtype", "bfloat16", 4
    yield "actor.gradient_checkpointing", True, 3
    yield from _halvings(config, "actor.max_tokens_per_microbatch", at_least=row_tokens)
    yield from _halvings(config, "actor.logprob_chunk_tokens", at_least=_FEWEST_TOKENS)
    yield "actor.fsdp2.reduce_gradients", "every_microbatch", 1
    yield "actor.fsdp2.reshard_after_forward", True, 2
    if config.has_critic and not config.has_critic_pool:
        yield "critic.gradient_checkpointing", True, 3
        yield from _halvings(config, "critic.max_tokens_per_microbatch", at_least=row_tokens)
    if config.megatron_worlds:
        yield "megatron.sequence_parallel", True, 1
        sizes = (  # tensor-parallel ranks exchange too much between nodes
            ("tensor", 2, cluster.num_ranks_per_node),
            ("expert", 2, cluster.num_ranks),
            ("pipeline", 3, cluster.num_ranks),
        )
        for name, price, most in sizes:
            yield from _doublings(config, f"megatron.{name}_parallel_size", price, at_most=most)
    if is_cuda:
        most = _MOST_RANKS_PER_NODE
        yield from _doublings(config, "cluster.num_ranks_per_node", 6, at_most=most)
    if is_cuda and cluster.ray_address is not None:
        yield from _doublings(config, "cluster.num_nodes", 7, at_most=_MOST_NODES)


def _halvings(
    config: ExperimentConfig, key: str, *, at_least: int
) -> Iterator[tuple[str, int, int]]:
    number: int = attrgetter(key)(config)
    for times in range(1, number.bit_length()):
        if number >> times >= at_least:
            yield key, number >> times, times


def _doublings(
    config: ExperimentConfig, key: str, price: int, *, at_most: int
) -> Iterator[tuple[str, int, int]]:
    number: int = attrgetter(key)(config)
    for times in range(1, 8):
        if number << times <= at_most:
            yield key, number << times, price * times


def _with_value(config: ExperimentConfig, key: str, value: object) -> ExperimentConfig:
    names = key.split(".")
    sections: list[Any] = [config]
    for name in names[:-1]:
        sections.append(attrgetter(name)(sections[-1]))
    changed: Any = value
    for section, name in zip(reversed(sections), reversed(names), strict=True):
        changed = replace(section, **{name: changed})
    result: ExperimentConfig = changed
    return result
