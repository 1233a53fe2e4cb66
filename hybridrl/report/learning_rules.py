"""Rules about the learning: reward, policy, gradient. Thresholds are in the metric's unit."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, median, pstdev

from hybridrl.report.evidence import ENOUGH_STEPS, RECENT_STEPS, Evidence, Finding

FLAT_GROUPS = 0.9
ENTROPY_NATS = 0.02
ENTROPY_SHARE = 0.1
KL_TO_OLD_NATS = 0.05
KL_TO_REFERENCE_NATS = 1.0
RATIO = 10.0
CLIPPED_SHARE = 0.95
CLIPPED_STEPS = 50
EVAL_FALL = 0.1


def all_groups_flat(evidence: Evidence) -> Finding | None:
    """Without a difference between siblings there is no advantage, and nothing is learned."""
    share = evidence.recent("reward/zero_variance_group_fraction")
    reward = evidence.recent("reward/mean")
    highest = max(evidence.history.get("reward/max").finite, default=None)
    if share is None or share < FLAT_GROUPS:
        return None
    is_solved = reward is not None and highest is not None and reward >= FLAT_GROUPS * highest > 0
    more = evidence.scaled("rollout.num_responses_per_prompt", 2)
    why = (
        "nearly every response is right: the data is too easy by now; use harder prompts"
        if is_solved
        else "no response is better than its siblings: the task is too hard for this model, or the "
        "reward function does not tell responses apart"
    )
    return Finding(
        severity="note" if is_solved else "warning",
        title="Nearly all groups are flat",
        text=f"For {share:.0%} of the prompts of the last {RECENT_STEPS} steps all responses got "
        f"the same reward, and such prompts teach nothing; {why}.",
        remedies=() if is_solved else (*more, "mode=sft"),
    )


def reward_is_flat(evidence: Evidence) -> Finding | None:
    """The last third of the run is no better than the first, beyond what chance explains."""
    values = evidence.history.get("reward/mean").finite
    flat_share = evidence.recent("reward/zero_variance_group_fraction") or 0.0
    if len(values) < ENOUGH_STEPS or flat_share >= FLAT_GROUPS:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    gain = fmean(last) - fmean(first)
    error = sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / third)
    if gain > 2 * error:
        return None
    verb = "has fallen" if gain < -2 * error else "does not rise"
    return Finding(
        severity="warning",
        title=f"The reward {verb}",
        text=f"Mean reward {fmean(first):.3g} over the first {third} steps, {fmean(last):.3g} over "
        f"the last {third}.",
        remedies=(
            *evidence.scaled("actor.optimizer.lr", 0.5 if gain < 0 else 2.0),
            *evidence.scaled("trainer.num_prompts_per_step", 2),
        ),
    )


def evaluation_falls(evidence: Evidence) -> Finding | None:
    """Two evaluations in a row lie well below the best one."""
    series = evidence.history.get("eval/reward/mean")
    values = series.finite
    if len(values) < 3:
        return None
    best = max(values)
    if max(values[-2:]) > best - EVAL_FALL * abs(best) or best == 0:
        return None
    step = series.steps[series.values.index(best)]
    return Finding(
        severity="warning",
        title="Evaluation is falling",
        text=f"Reward on held-out prompts was {best:.3g} at step {step} and is {values[-1]:.3g} "
        "now: the policy no longer generalises; end earlier, or hold it nearer to where it began.",
        remedies=(
            f"trainer.num_steps={max(step, 1)}",
            "algorithm.kl.placement=loss algorithm.kl.coefficient=0.01",
        ),
    )


def entropy_collapsed(evidence: Evidence) -> Finding | None:
    """A policy that is certain of everything explores nothing."""
    series = evidence.history.get("policy/entropy_nats/mean")
    now = evidence.recent("policy/entropy_nats/mean")
    if now is None or len(series.finite) < ENOUGH_STEPS:
        return None
    before = fmean(series.finite[:RECENT_STEPS])
    if now > ENTROPY_NATS or now > ENTROPY_SHARE * before:
        return None
    return Finding(
        severity="warning",
        title="Entropy has collapsed",
        text=f"From {before:.3g} to {now:.3g} nats per token: responses to a prompt are nearly the "
        "same, so there is little left to learn from.",
        remedies=("algorithm.entropy_coefficient=0.001", "algorithm.clip_high=0.28"),
    )


def policy_moves_too_fast(evidence: Evidence) -> Finding | None:
    """The update leaves the region in which the surrogate means something."""
    kl = evidence.recent("policy/kl_to_old_nats/mean")
    ratio = max(evidence.history.get("policy/ratio/max").finite[-RECENT_STEPS:], default=0.0)
    if (kl is None or kl < KL_TO_OLD_NATS) and ratio < RATIO:
        return None
    return Finding(
        severity="warning",
        title="The policy moves too fast within a step",
        text=f"In the last {RECENT_STEPS} steps KL to the policy that sampled was {kl or 0:.3g} "
        f"nats per token, the largest probability ratio {ratio:.3g}.",
        remedies=(*evidence.scaled("actor.optimizer.lr", 0.5), "algorithm.num_epochs=1"),
    )


def far_from_reference(evidence: Evidence) -> Finding | None:
    """The policy has become another model."""
    kl = evidence.recent("policy/kl_to_reference_nats/mean")
    if kl is None or kl < KL_TO_REFERENCE_NATS:
        return None
    return Finding(
        severity="warning",
        title="The policy is far from its reference",
        text=f"KL to the reference is {kl:.3g} nats per token over the last {RECENT_STEPS} steps.",
        remedies=(
            *evidence.scaled("algorithm.kl.coefficient", 3.0),
            *evidence.scaled("actor.optimizer.lr", 0.5),
        ),
    )


def gradient_always_clipped(evidence: Evidence) -> Finding | None:
    """Clipping nearly every step makes the limit a second learning rate."""
    limit = evidence.settings.number("actor.optimizer.max_grad_norm")
    norms = evidence.history.get("policy/grad_norm").finite[-CLIPPED_STEPS:]
    if not limit or len(norms) < ENOUGH_STEPS:
        return None
    share = sum(norm > limit for norm in norms) / len(norms)
    if share < CLIPPED_SHARE:
        return None
    return Finding(
        severity="note",
        title="The gradient is clipped nearly always",
        text=f"In {share:.0%} of the last {len(norms)} steps its norm (median {median(norms):.3g}) "
        f"was above actor.optimizer.max_grad_norm={limit:g}: the limit, not the learning rate, "
        "sets the size of an update. Harmless with Adam, but then the learning rate tells little.",
        remedies=(f"actor.optimizer.max_grad_norm={float(f'{2 * median(norms):.1g}'):g}",),
    )


def updates_skipped(evidence: Evidence) -> Finding | None:
    """A loss or gradient was not finite."""
    series = evidence.history.get("policy/skipped_updates")
    skipped = [s for s, v in zip(series.steps, series.values, strict=True) if v]
    if not skipped:
        return None
    if blamed := _steps_without_a_reward(evidence, skipped):
        return Finding(
            severity="warning",
            title="Rewards were not finite",
            text=f"In {len(blamed)} of {len(series.steps)} steps the mean reward was not finite, "
            "so the loss was not either, and the update was left out; the last time in step "
            f"{blamed[-1]}. The reward function is at fault, not the learning rate. With the "
            "override below the run ends and names the response.",
            remedies=("reward.on_error=stop",),
        )
    return Finding(
        severity="warning",
        title="Updates were left out",
        text=f"In {len(skipped)} of {len(series.steps)} steps a loss or gradient was not finite; "
        f"the last time in step {skipped[-1]}.",
        remedies=(*evidence.scaled("actor.optimizer.lr", 0.5), "actor.compute_dtype=float32"),
    )


def _steps_without_a_reward(evidence: Evidence, steps: list[int]) -> list[int]:
    """Return those of the steps whose mean reward was logged, and was not finite."""
    rewards = evidence.history.get("reward/mean")
    known = dict(zip(rewards.steps, rewards.values, strict=True))
    return [step for step in steps if step in known and known[step] is None]
