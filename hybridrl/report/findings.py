"""Findings: advice of an experienced user about a run, each with overrides to type.

A rule looks at the last steps and is silent unless it is sure. It advises a direction only with
evidence for it: a lower learning rate if the run got worse than before, a higher one only if the
policy has not changed. Thresholds are in the metric's unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, pstdev
from typing import Literal

from hybridrl.report.run import Run
from hybridrl.serving.health import LOST, REPLACED

RECENT_STEPS = 10
"""A present value is the mean over this many steps."""

ENOUGH_STEPS = 30
"""A rule about a trend needs this many steps."""

LR = "actor.optimizer.lr"
LOG_LINES = 12
FLAT_GROUPS = 0.9
NEARLY_GONE = 1 / 3

_SLOWER = f"{LR}*0.5"
_ADD_KL = "algorithm.kl.placement=loss algorithm.kl.coefficient=0.01"

_ERROR_MARK = "the run ended with an error"
_TRACEBACK = "Traceback (most recent call last):"
_LINES_AFTER_THE_END = ("run folder:", "hybridrl.report", "trace")
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [A-Z] ")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a run."""

    title: str
    text: str
    """The observation, with values."""

    remedies: tuple[str, ...] = ()
    """Overrides, best first; ``key*2`` stands for twice the present value of a key."""

    severity: Literal["error", "warning", "note"] = "warning"
    quote: str = ""
    """Lines of a log."""

    def overrides(self, run: Run) -> list[str]:
        """Return the remedies as typed, without those whose key has no number in this run."""
        spelled = []
        for remedy in self.remedies:
            key, times, factor = remedy.partition("*")
            value = run.settings.number(key)
            if not times:
                spelled.append(remedy)
            elif value:
                number = value * float(factor)
                is_whole = isinstance(run.settings.flat[key], int)
                spelled.append(f"{key}={round(number) if is_whole else float(f'{number:.2g}'):g}")
        return spelled


def diagnose(run: Run) -> list[Finding]:
    """Apply all rules; errors first, then warnings, then notes."""
    order = ("error", "warning", "note")
    is_game = any(name.startswith("reward/baseline/") for name in run.history.names)
    rules = [rule for rule in RULES if not (is_game and rule in _OF_ROWS)]
    findings = [finding for rule in rules if (finding := rule(run)) is not None]
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def recent(run: Run, name: str) -> float:
    """Return the mean of a metric over the last steps; 0 if there are too few."""
    return run.history.get(name).mean_of_last(RECENT_STEPS) or 0.0


def first_and_now(run: Run, name: str) -> tuple[float, float] | None:
    """Return the means of a metric over the first and the last steps, if there are enough."""
    values = run.history.get(name).finite
    if len(values) < ENOUGH_STEPS:
        return None
    return fmean(values[:RECENT_STEPS]), fmean(values[-RECENT_STEPS:])


def ended_with_error(run: Run) -> Finding | None:
    """The log ends with an error, and the run was not started again."""
    marks = [number for number, line in enumerate(run.log_lines) if _ERROR_MARK in line]
    if not marks:
        return None
    after = run.log_lines[marks[-1] + 1 :]
    logged = [line for line in after if _LOG_LINE.match(line)]
    if any(not any(mark in line for mark in _LINES_AFTER_THE_END) for line in logged):
        return None  # the run was resumed
    message = [line for line in after if line.strip() and line not in logged] or ["no message"]
    quote = "\n".join(message[-LOG_LINES:])
    text = _error_of(message)
    if "RunInterrupted: " in text:
        return Finding("The run was stopped within a step", text, (), "note", quote)
    return Finding("The run ended with an error", text, (), "error", quote)


def _error_of(message: Sequence[str]) -> str:
    """Return the line of the last exception, which notes may follow; else the last line."""
    starts = [number for number, line in enumerate(message) if line.startswith(_TRACEBACK)]
    behind = message[starts[-1] + 1 :] if starts else ()
    return next((line for line in behind if not line.startswith(" ")), message[-1]).strip()


def generate_dominates(run: Run) -> Finding | None:
    """Sampling takes nearly all the time, so a speed-up must begin with it."""
    generate, step = recent(run, "time/generate_s"), recent(run, "time/step_s")
    if not generate or generate < 0.75 * step:
        return None
    text = f"generate takes {generate:.3g} of {step:.3g} s of a step. Its decoding slots are "
    occupancy, remedy = recent(run, "rollout/slot_occupancy"), "rollout.num_slots*2"
    if occupancy > 0.9:
        text += "all full: more of them use the device better."
    else:
        text += f"busy {occupancy:.0%} of the time: the longest responses are waited for."
        remedy = "rollout.max_response_tokens*0.75"
    return Finding("Sampling takes most of the time", text, (remedy,), "note")


def sampler_differs(run: Run) -> Finding | None:
    """Trainer and sampler should be the same policy."""
    mismatch = recent(run, "policy/sampler_mismatch_nats/mean")
    text = f"Their log-probs of the same tokens differ by {mismatch:.3g} nats on average: the "
    text += "rollouts come from another policy than the one that is trained."
    remedies = ("algorithm.rollout_correction=importance", "rollout.dtype=float32")
    return Finding("Trainer and sampler disagree", text, remedies) if mismatch > 0.02 else None


def rewards_failed(run: Run) -> Finding | None:
    """The reward function could not score responses."""
    share = recent(run, "reward/failed_fraction")
    text = f"{share:.0%} of the recent responses made the reward function fail, and counted as 0; "
    text += "with the override below the first failure is shown."
    remedies = ("reward.on_error=stop",)
    return Finding("Responses could not be scored", text, remedies) if share > 0.01 else None


def requests_aborted(run: Run) -> Finding | None:
    """The engine was drained by force."""
    total = sum(run.history.get("rollout/aborted_requests").finite)
    text = f"{total:g} generation requests did not finish before the engine was drained."
    return Finding("Requests were cut off", text, ("rollout.drain_timeout_s*2",)) if total else None


def engines_lost(run: Run) -> Finding | None:
    """Engines of the servers died, hung or failed."""
    lost, replaced = (
        sum(run.history.get(f"rollout/{what}_engines").finite) for what in ("lost", "replaced")
    )
    if not lost:
        return None
    text = f"{lost:g} rollout engines were lost, and {replaced:g} replaced"
    if took_s := run.history.get("time/replace_engine_s").finite:
        text += f", the slowest within {max(took_s):.3g} s"
    events = [line for line in run.manager_lines if LOST in line or REPLACED in line]
    quote = "\n".join(events[-LOG_LINES:])
    return Finding("Rollout engines were lost", f"{text}.", quote=quote)


def memory_did_not_move(run: Run) -> Finding | None:
    """The life cycle ran, but its memory figures mean nothing."""
    if not sum(run.history.get("memory/noop_releases").finite):
        return None
    text = "SGLang on a CPU answers release and resume without freeing anything: the order of the "
    text += "stages was the real one, but their memory and time prove nothing for a GPU."
    return Finding("Memory did not move", text, ("rollout.sleep=false",), "note")


def training_did_harm(run: Run) -> Finding | None:
    """The reward is clearly below that of the model before training: updates are too large."""
    held_out = run.history.get("eval/reward/mean").finite
    values = run.history.get("reward/mean").finite
    if len(held_out) >= 3:
        label, first, now = "Held-out reward", held_out[0], fmean(held_out[-2:])
        is_worse = now < first - 0.2 * abs(first)
    elif len(values) >= ENOUGH_STEPS:
        label, first, now = "Mean reward", fmean(values[:3]), fmean(values[-(len(values) // 3) :])
        is_worse = now < NEARLY_GONE * first
    else:
        return None
    text = f"{label} was {first:.3g} at first and is {now:.3g} now: updates are too large."
    remedies = (f"{LR}*{0.1 if now < NEARLY_GONE * first else 0.3}", _ADD_KL)
    return Finding("Training made the model worse", text, remedies) if is_worse else None


def rewards_do_not_differ(run: Run) -> Finding | None:
    """Without a difference between responses to a prompt there is no advantage to learn from."""
    share, reward = recent(run, "reward/zero_variance_group_fraction"), recent(run, "reward/mean")
    if share < FLAT_GROUPS or training_did_harm(run) or reward_may_be_gamed(run):
        return None
    highest = max(run.history.get("reward/max").finite, default=0.0)
    text = f"For {share:.0%} of the recent prompts all responses got the same reward, "
    if reward >= FLAT_GROUPS * highest > 0:
        text += "nearly always the highest: continue with harder prompts."
        return Finding("The task is solved", text, severity="note")
    text += "so nothing is learned. Read the responses below: either the reward function does not "
    text += "recognise a right answer, or the task is too hard for this model."
    if highest <= 0:
        text = f"No response of the run was ever rewarded. {text}"
    remedies = ("mode=sft", "rollout.num_responses_per_prompt*2")
    return Finding("Nearly all rewards are equal", text, remedies)


def first_rewards_do_not_differ(run: Run) -> Finding | None:
    """A young run in which no two responses of a step got different rewards."""
    spreads = run.history.get("reward/std").finite
    if not 0 < len(spreads) < RECENT_STEPS or max(spreads) > 0.0:
        return None
    if min(run.history.get("reward/failed_fraction").finite, default=0.0) == 1.0:
        text = "No response of the run could be scored: the reward function fails on all of them."
        return Finding("No response could be scored", text, ("reward.on_error=stop",), "error")
    text = f"All responses of each of the first {len(spreads)} steps got the same reward, so "
    text += "nothing is learned. Read the responses below: either the reward function does not "
    text += "recognise a right answer, or the task is too hard or too easy for this model."
    return Finding("All rewards are equal so far", text)


def reward_does_not_rise(run: Run) -> Finding | None:
    """The last third of the run is no better than the first, beyond chance; or hardly."""
    values = run.history.get("reward/mean").finite
    is_flat = recent(run, "reward/zero_variance_group_fraction") >= FLAT_GROUPS
    if len(values) < ENOUGH_STEPS or is_flat or training_did_harm(run):
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    gain = fmean(last) - fmean(first)
    chance = 2 * sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / third)
    if gain > chance and not _has_hardly_changed(run, 0.05):
        return None
    text = f"Mean reward {fmean(first):.3g} over the first {third} steps, {fmean(last):.3g} over "
    text += f"the last {third}. "
    if gain < -chance:
        return Finding("The reward has fallen", f"{text}Updates are too large.", (f"{LR}*0.3",))
    title, more_prompts = "The reward does not rise", "trainer.num_prompts_per_step*2"
    if gain > chance:
        text += "Entropy and length of the responses have hardly changed: larger updates may get "
        text += "there sooner."
        return Finding("The reward rises slowly", text, (f"{LR}*3",), "note")
    if _has_hardly_changed(run, 0.1):
        text += "Entropy and length of the responses have hardly changed: updates are too small."
        return Finding(title, text, (f"{LR}*3", more_prompts))
    text += "The policy moves, but the gradient of a step is mostly chance."
    return Finding(title, text, (more_prompts,))


def _has_hardly_changed(run: Run, share: float) -> bool:
    names = ("policy/entropy_nats/mean", "length/response_tokens/mean")
    ends = [pair for name in names if (pair := first_and_now(run, name))]
    return bool(ends) and all(abs(now - before) < share * before for before, now in ends)


def reward_may_be_gamed(run: Run) -> Finding | None:
    """The reward rises while more and more responses are cut off before their end."""
    reward = first_and_now(run, "reward/mean")
    cut = first_and_now(run, "rollout/truncated_fraction")
    if not reward or not cut or cut[1] < cut[0] + 0.3 or reward[1] <= reward[0]:
        return None
    text = f"Mean reward rose from {reward[0]:.3g} to {reward[1]:.3g}, yet {cut[1]:.0%} of the "
    text += "responses are cut off at the length limit. Text without an end is rarely a right "
    text += "answer: read the responses below, and correct the reward function if it pays for "
    text += "something else than the task."
    return Finding("The reward may be gamed", text, (_ADD_KL,))


def responses_are_cut(run: Run) -> Finding | None:
    """Responses at the length limit are scored without their end."""
    share = recent(run, "rollout/truncated_fraction")
    if share < 0.2 or training_did_harm(run) or reward_may_be_gamed(run):
        return None  # after harm or reward hacking, longer responses would be no better
    limit = run.settings.text("rollout.max_response_tokens")
    text = f"{share:.0%} of the recent responses reached the limit of {limit} tokens, and were "
    text += "scored without their end."
    return Finding("Many responses are cut off", text, ("rollout.max_response_tokens*2",))


def evaluation_falls(run: Run) -> Finding | None:
    """Two evaluations in a row lie well below the best one, which came after training began."""
    values, best = run.history.get("eval/reward/mean").finite, run.best_evaluation
    if len(values) < 3 or not best or not best[0] or training_did_harm(run):
        return None
    if max(values[-2:]) > best[0] - 0.1 * abs(best[0]):
        return None
    text = f"Held-out reward was {best[0]:.3g} at step {best[1]} and is {values[-1]:.3g} now: the "
    text += "policy no longer generalises. End earlier, or hold it nearer to the model it began as."
    return Finding("Evaluation is falling", text, (f"trainer.num_steps={max(best[1], 1)}", _ADD_KL))


def entropy_collapsed(run: Run) -> Finding | None:
    """A policy that is certain of every token does not explore."""
    entropy = first_and_now(run, "policy/entropy_nats/mean")
    if not entropy or entropy[1] > min(0.02, 0.1 * entropy[0]):
        return None
    text = f"From {entropy[0]:.3g} to {entropy[1]:.3g} nats per token: responses to a prompt are "
    text += "nearly the same, so there is little left to learn from."
    remedies = ("algorithm.entropy_coefficient=0.001", "algorithm.clip_high=0.28")
    return Finding("Entropy has collapsed", text, remedies)


def policy_moves_too_fast(run: Run) -> Finding | None:
    """The update leaves the region in which the surrogate loss is valid."""
    kl = recent(run, "policy/kl_to_old_nats/mean")
    ratio = max(run.history.get("policy/ratio/max").finite[-RECENT_STEPS:], default=0.0)
    if kl < 0.05 and ratio < 10.0:
        return None
    text = f"In the last {RECENT_STEPS} steps KL to the policy that sampled was {kl:.3g} nats per "
    text += f"token, the largest probability ratio {ratio:.3g}."
    remedies = (_SLOWER, "algorithm.num_epochs=1")
    return Finding("The policy moves too fast within a step", text, remedies)


def far_from_reference(run: Run) -> Finding | None:
    """The policy is far from the reference model."""
    kl = recent(run, "policy/kl_to_reference_nats/mean")
    text = f"KL to the reference is {kl:.3g} nats per token over the last {RECENT_STEPS} steps."
    title, remedies = (
        "The policy is far from its reference",
        ("algorithm.kl.coefficient*3", _SLOWER),
    )
    return Finding(title, text, remedies) if kl >= 1.0 else None


def gradient_far_above_limit(run: Run) -> Finding | None:
    """Strong clipping in every step makes the limit a second learning rate."""
    limit = run.settings.number("actor.optimizer.max_grad_norm")
    norms = run.history.get("policy/grad_norm").finite[-ENOUGH_STEPS:]
    if not limit or len(norms) < ENOUGH_STEPS or median(norms) < 10.0 * limit:
        return None
    text = f"Its median norm is {median(norms):.3g}, actor.optimizer.max_grad_norm={limit:g}: "
    text += "every step is clipped, and an outlier weighs as much as any other step."
    remedy = f"actor.optimizer.max_grad_norm={float(f'{2 * median(norms):.1g}'):g}"
    return Finding("The gradient is far above its limit", text, (remedy,), "note")


def updates_skipped(run: Run) -> Finding | None:
    """A loss or gradient was not finite."""
    updates, rewards = (run.history.get(n) for n in ("policy/skipped_updates", "reward/mean"))
    skipped = [step for step, count in zip(updates.steps, updates.values, strict=True) if count]
    if not skipped:
        return None
    lacking = {s for s, reward in zip(rewards.steps, rewards.values, strict=True) if reward is None}
    if blamed := [step for step in skipped if step in lacking]:
        text = f"In {len(blamed)} steps the mean reward was not finite, so the update was left "
        text += f"out; the last time in step {blamed[-1]}. The reward function is at fault, not "
        text += "the learning rate. With the override below the run ends and names the response."
        return Finding("Rewards were not finite", text, ("reward.on_error=stop",))
    text = f"In {len(skipped)} steps a loss or gradient was not finite; the last time in step "
    remedies = (_SLOWER, "actor.compute_dtype=float32")
    return Finding("Updates were left out", f"{text}{skipped[-1]}.", remedies)


_OF_ROWS = (reward_does_not_rise, rewards_do_not_differ, first_rewards_do_not_differ)
"""They compare rewards of rows, and those of the players of a game may add up to 0."""

RULES: tuple[Callable[[Run], Finding | None], ...] = (
    *(ended_with_error, sampler_differs, rewards_failed, requests_aborted),
    *(engines_lost, generate_dominates, memory_did_not_move),
    *(training_did_harm, reward_does_not_rise, reward_may_be_gamed, rewards_do_not_differ),
    first_rewards_do_not_differ,
    *(evaluation_falls, entropy_collapsed, policy_moves_too_fast, far_from_reference),
    *(updates_skipped, responses_are_cut, gradient_far_above_limit),
)
