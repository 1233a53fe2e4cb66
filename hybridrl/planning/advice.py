"""The one key to change when a plan does not fit, found by trying changes through the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.memory import plan_memory

_FEWEST_TOKENS = 128  # of a chunk of logits: smaller ones save nothing that counts


@dataclass(frozen=True, slots=True)
class Knob:
    """One override and what it does to the peak."""

    override: str
    """As typed on the command line."""

    price: int
    """How much it costs in time or precision, to compare knobs: 1 is hardly noticed."""

    config: ExperimentConfig
    """The configuration with it."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank with the override."""
        plan = plan_memory(self.config)
        return plan.peak_bytes(plan.fullest)


def find_knob(config: ExperimentConfig, *, capacity_bytes: int) -> Knob | None:
    """Return the cheapest single override with which a rank fits; of equal ones the smallest.

    Overrides that break a rule of the configuration are passed over.

    Args:
        config: a configuration that does not fit.
        capacity_bytes: memory of one rank's device.
    """
    before = len(find_violations(config))
    fitting = (
        knob
        for knob in sorted(knobs(config), key=lambda knob: knob.price)
        if knob.peak_bytes <= capacity_bytes and len(find_violations(knob.config)) <= before
    )
    return next(fitting, None)


def largest_saving(config: ExperimentConfig) -> Knob | None:
    """Return the override that lowers the peak most; None if none lowers it."""
    plan = plan_memory(config)
    lowest = min(knobs(config), key=lambda knob: knob.peak_bytes, default=None)
    return lowest if lowest and lowest.peak_bytes < plan.peak_bytes(plan.fullest) else None


def knobs(config: ExperimentConfig) -> Iterator[Knob]:
    """Yield single overrides that save memory, with their prices.

    Each halving of a size costs 1, more exchanges between ranks 1 or 2, checkpointing 3 (a third
    more time), a change of precision 4, and each doubling of ranks 6, because nobody can conjure
    GPUs. Of parallel sizes on the same ranks each doubling costs 2 where activations are exchanged,
    and 3 where a pipeline has bubbles.
    """
    yield from _rollout_knobs(config)
    yield from _actor_knobs(config)
    if config.has_critic and not config.has_critic_pool:
        yield from _critic_knobs(config)
    if config.megatron_worlds:
        yield from _parallel_knobs(config)
    if config.cluster.device == "cuda":
        yield from _rank_knobs(config)


def _rollout_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    rollout = config.rollout
    if not rollout.sleep:
        yield Knob("rollout.sleep=true", 1, replace(config, rollout=replace(rollout, sleep=True)))
    for price, number in _halvings(rollout.num_slots, at_least=1):
        changed = replace(rollout, num_slots=number)
        yield Knob(f"rollout.num_slots={number}", price, replace(config, rollout=changed))
    if rollout.dtype == "float32" and config.cluster.device == "cuda":
        changed = replace(rollout, dtype="bfloat16")
        yield Knob("rollout.dtype=bfloat16", 4, replace(config, rollout=changed))


def _actor_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    actor = config.actor
    if not actor.gradient_checkpointing:
        changed = replace(actor, gradient_checkpointing=True)
        yield Knob("actor.gradient_checkpointing=true", 3, replace(config, actor=changed))
    for price, number in _halvings(actor.max_tokens_per_microbatch, at_least=config.max_row_tokens):
        changed = replace(actor, max_tokens_per_microbatch=number)
        override = f"actor.max_tokens_per_microbatch={number}"
        yield Knob(override, price, replace(config, actor=changed))
    for price, number in _halvings(actor.logprob_chunk_tokens, at_least=_FEWEST_TOKENS):
        changed = replace(actor, logprob_chunk_tokens=number)
        yield Knob(f"actor.logprob_chunk_tokens={number}", price, replace(config, actor=changed))
    if actor.compute_dtype == "float32" and config.cluster.device == "cuda":
        changed = replace(actor, compute_dtype="bfloat16")
        yield Knob("actor.compute_dtype=bfloat16", 4, replace(config, actor=changed))
    yield from _fsdp2_knobs(config)


def _fsdp2_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    """Yield the way back from what keeps more in memory than need be."""
    actor, options = config.actor, config.actor.fsdp2
    if options.reduce_gradients == "last_microbatch":
        changed = replace(actor, fsdp2=replace(options, reduce_gradients="every_microbatch"))
        override = "actor.fsdp2.reduce_gradients=every_microbatch"
        yield Knob(override, 1, replace(config, actor=changed))
    if not options.reshard_after_forward:
        changed = replace(actor, fsdp2=replace(options, reshard_after_forward=True))
        override = "actor.fsdp2.reshard_after_forward=true"
        yield Knob(override, 2, replace(config, actor=changed))


def _critic_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    critic = config.critic
    if not critic.gradient_checkpointing:
        changed = replace(critic, gradient_checkpointing=True)
        yield Knob("critic.gradient_checkpointing=true", 3, replace(config, critic=changed))
    least = config.max_row_tokens
    for price, number in _halvings(critic.max_tokens_per_microbatch, at_least=least):
        changed = replace(critic, max_tokens_per_microbatch=number)
        override = f"critic.max_tokens_per_microbatch={number}"
        yield Knob(override, price, replace(config, critic=changed))


def _parallel_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    megatron = config.megatron
    if not megatron.sequence_parallel:
        changed = replace(megatron, sequence_parallel=True)
        yield Knob("megatron.sequence_parallel=true", 1, replace(config, megatron=changed))
    for doublings in range(1, 7):
        size = megatron.tensor_parallel_size << doublings
        if size <= config.cluster.num_ranks_per_node:  # they exchange too much between nodes
            changed = replace(megatron, tensor_parallel_size=size)
            override = f"megatron.tensor_parallel_size={size}"
            yield Knob(override, 2 * doublings, replace(config, megatron=changed))
        size = megatron.expert_parallel_size << doublings
        changed = replace(megatron, expert_parallel_size=size)
        override = f"megatron.expert_parallel_size={size}"
        if size <= config.cluster.num_ranks:
            yield Knob(override, 2 * doublings, replace(config, megatron=changed))
        size = megatron.pipeline_parallel_size << doublings
        changed = replace(megatron, pipeline_parallel_size=size)
        override = f"megatron.pipeline_parallel_size={size}"
        if size <= config.cluster.num_ranks:
            yield Knob(override, 3 * doublings, replace(config, megatron=changed))


def _rank_knobs(config: ExperimentConfig) -> Iterator[Knob]:
    cluster = config.cluster
    for doublings in range(1, 8):
        number = cluster.num_ranks_per_node * 2**doublings
        changed = replace(cluster, num_ranks_per_node=number)
        override = f"cluster.num_ranks_per_node={number}"
        if number <= 8:  # GPUs of a usual machine
            yield Knob(override, 6 * doublings, replace(config, cluster=changed))
        number = cluster.num_nodes * 2**doublings
        changed = replace(cluster, num_nodes=number)
        if cluster.ray_address is not None:
            override = f"cluster.num_nodes={number}"
            yield Knob(override, 7 * doublings, replace(config, cluster=changed))


def _halvings(number: int, *, at_least: int) -> Iterator[tuple[int, int]]:
    """Yield (how often halved, result) down to a least result."""
    for times in range(1, number.bit_length()):
        if number >> times < at_least:
            return
        yield times, number >> times
