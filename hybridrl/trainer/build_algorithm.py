"""From the ``algorithm`` section to the object that takes a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

from hybridrl.algorithms.kl import KLCoefficient
from hybridrl.algorithms.load import Part, load_part, load_parts_by_source, require_part
from hybridrl.batch import LogprobBatch, RolloutBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.errors import TrainingError
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.advantages import Advantages
from hybridrl.trainer.batches import Batches
from hybridrl.trainer.collect import Collector, Reward
from hybridrl.trainer.policy import Critic, Generates, Policy
from hybridrl.trainer.step import ActorCriticOptimization, PolicyOptimization
from hybridrl.trainer.train_batch import TrainBatches, balance

Algorithm = PolicyOptimization | ActorCriticOptimization


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """The objects that every algorithm uses."""

    policy: Policy
    engines: Generates  # give responses: those of the policy, or recorded ones
    batches: Batches

    sampling: SamplingParams
    reward: Reward
    kl: KLCoefficient
    advantage_state: dict[str, float]
    on_phase: Callable[[str], None]


def build_policy_optimization(config: ExperimentConfig, given: Ingredients) -> PolicyOptimization:
    """Build an algorithm without a critic: GRPO and its relatives."""
    algorithm = config.algorithm
    return PolicyOptimization(
        policy=given.policy,
        collect=Collector(
            batches=given.batches,
            policy=given.engines,
            sampling=given.sampling,
            reward=given.reward,
            group_filter=_load(config, parts.GROUP_FILTER),
            max_rounds=algorithm.max_sampling_rounds,
            samples_greedily=algorithm.reads("greedy_rewards_B"),
        ),
        logprobs=_choose_logprobs(config, given.policy),
        advantages=_build_advantages(config, given.advantage_state),
        kl=given.kl,
        build_batch=_build_batches(config),
        on_phase=given.on_phase,
    )


def build_actor_critic(
    config: ExperimentConfig, given: Ingredients, critic: Critic
) -> Callable[[int], ActorCriticOptimization]:
    """Build PPO's step function of step n, from 1. In the critic's warm-up the policy is frozen."""
    actor_critic = ActorCriticOptimization(
        policy=given.policy,
        batches=given.batches,
        critic=critic,
        sampling=given.sampling,
        reward=given.reward,
        logprobs=_choose_logprobs(config, given.policy),
        advantages=_build_advantages(config, given.advantage_state),
        kl=given.kl,
        build_batch=_build_batches(config),
        balance_critic=partial(
            balance, dp_size=config.num_critic_groups, num_minibatches=config.critic.num_minibatches
        ),
        on_phase=given.on_phase,
    )
    warm_up = replace(actor_critic, policy_learns=False)
    return lambda step: warm_up if step <= config.critic.num_warmup_steps else actor_critic


def _choose_logprobs(
    config: ExperimentConfig, policy: Policy
) -> Callable[[RolloutBatch], LogprobBatch]:
    # Old log-probs are recomputed by the ranks, the sampler's, or those of the update itself.
    algorithm = config.algorithm

    def logprobs(rollouts: RolloutBatch) -> LogprobBatch:
        scored = LogprobBatch(batch_size=[len(rollouts)])  # the update's own are the old ones
        if algorithm.scores_rollouts:
            scored = policy.compute_logprobs(rollouts)
        if rollouts.teacher_logprobs_BL is not None:
            scored.teacher_logprobs_BL = rollouts.teacher_logprobs_BL
        if algorithm.old_logprobs == "sampler":  # the policy's ratio corrects for it
            scored.old_logprobs_BL = rollouts.sampler_logprobs_BL
        return scored

    return logprobs


def _build_advantages(config: ExperimentConfig, state: dict[str, float]) -> Advantages:
    algorithm = config.algorithm
    charges_kl = algorithm.kl.placement == "reward"
    limited = partial(with_time_limit, timeout_s=config.cluster.call_timeout_s)
    by_source = load_parts_by_source(algorithm)
    return Advantages(
        part=limited(require_part(algorithm, parts.ADVANTAGE)),
        by_source={name: limited(part) for name, part in by_source.items()},
        kl_estimator=require_part(algorithm, parts.KL) if charges_kl else None,
        soft_overlong_tokens=algorithm.soft_overlong_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        agent_names=config.reward.agent_names,
        state=state,
    )


def _load(config: ExperimentConfig, kind: parts.PartKind) -> Part | None:
    part = load_part(config.algorithm, kind)
    if part is None:
        return None
    return with_time_limit(part, timeout_s=config.cluster.call_timeout_s)


def _build_batches(config: ExperimentConfig) -> TrainBatches:
    algorithm = config.algorithm
    is_corrected_here = algorithm.old_logprobs == "recompute"
    return TrainBatches(
        dp_size=config.num_train_groups,
        num_minibatches=algorithm.num_minibatches,
        mask_truncated=algorithm.mask_truncated,
        correction=_load(config, parts.ROLLOUT_CORRECTION) if is_corrected_here else None,
        counts_groups=parts.AGGREGATION.reads(algorithm.loss_aggregation, "group_tokens_B"),
        row_filter=_load(config, parts.ROW_FILTER),
    )


def with_time_limit(part: Part, *, timeout_s: float) -> Part:
    """Return the part; one of the user's raises `TrainingError` if a call takes too long."""
    if ":" not in part.spelled:
        return part
    message = (
        f"{part.key}={part.spelled} took longer than cluster.call_timeout_s={timeout_s:g} s; "
        "correct it, or raise that limit if it is only slow"
    )

    def limited(**inputs: object) -> Any:  # noqa: ANN401 - by the kind of part
        with _limit(timeout_s, message):
            return part.function(**inputs)

    return replace(part, function=limited)


@contextmanager
def _limit(timeout_s: float, message: str) -> Iterator[None]:
    """Raise in the block once the time is over; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TrainingError(message)

    former = signal.signal(signal.SIGALRM, give_up)
    begin = time.monotonic()
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        if remaining_s:  # of a limit around this one
            left_s = remaining_s - (time.monotonic() - begin)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
