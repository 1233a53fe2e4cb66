"""Rules about the running: errors, sampling, scoring, time. Thresholds are in the metric's unit."""

from __future__ import annotations

import re

from hybridrl.report.evidence import RECENT_STEPS, Evidence, Finding

TRUNCATED = 0.2
MISMATCH_NATS = 0.02
GENERATE_SHARE = 0.75
FAILED = 0.01
LOG_LINES = 12

_ERROR_MARK = "the run ended with an error"
_LAST_WORDS = ("run folder:", "hybridrl.report", "trace")
"""Of lines that a run writes after its end; any other means that it was taken up again."""
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [A-Z] ")


def ended_with_error(evidence: Evidence) -> Finding | None:
    """The log says so, and no later start follows it."""
    lines = list(evidence.log_lines)
    marks = [number for number, line in enumerate(lines) if _ERROR_MARK in line]
    if not marks:
        return None
    after = lines[marks[-1] + 1 :]
    if any(_LOG_LINE.match(line) and not any(w in line for w in _LAST_WORDS) for line in after):
        return None
    told = [line for line in after if line.strip() and not _LOG_LINE.match(line)]
    last = told[-1].strip() if told else "no message"
    return Finding(
        severity="error",
        title="The run ended with an error",
        text=last,
        quote="\n".join(told[-LOG_LINES:]),
    )


def responses_are_cut(evidence: Evidence) -> Finding | None:
    """Responses that reach the limit are scored without their end."""
    share = evidence.recent("rollout/truncated_fraction")
    if share is None or share < TRUNCATED:
        return None
    limit = evidence.settings.number("rollout.max_response_tokens") or 0
    return Finding(
        severity="warning",
        title="Many responses are cut off",
        text=f"{share:.0%} of the responses of the last {RECENT_STEPS} steps reached the limit of "
        f"{limit:g} tokens, and were scored without their end.",
        remedies=evidence.scaled("rollout.max_response_tokens", 2),
    )


def sampler_differs(evidence: Evidence) -> Finding | None:
    """Trainer and sampler should be the same policy."""
    mismatch = evidence.recent("policy/sampler_mismatch_nats/mean")
    if mismatch is None or mismatch < MISMATCH_NATS:
        return None
    return Finding(
        severity="warning",
        title="Trainer and sampler disagree",
        text=f"Their log-probs of the same tokens differ by {mismatch:.3g} nats on average: the "
        "rollouts come from another policy than the one that is trained.",
        remedies=("algorithm.sampler_ratio_cap=2", "rollout.dtype=float32"),
    )


def generate_dominates(evidence: Evidence) -> Finding | None:
    """Sampling takes nearly all the time, so this is where a speed-up is."""
    generate, step = (evidence.recent(f"time/{name}_s") for name in ("generate", "step"))
    if not generate or not step or generate < GENERATE_SHARE * step:
        return None
    occupancy = evidence.recent("rollout/slot_occupancy") or 0.0
    hint = (
        "Its decoding slots are full: more of them use the device better."
        if occupancy > 0.9
        else f"Its decoding slots are busy {occupancy:.0%} of the time: the longest responses are "
        "waited for; a lower limit of their length costs least."
    )
    return Finding(
        severity="note",
        title="Sampling takes most of the time",
        text=f"generate takes {generate:.3g} of {step:.3g} s of a step. {hint}",
        remedies=evidence.scaled("rollout.num_slots", 2)
        if occupancy > 0.9
        else evidence.scaled("rollout.max_response_tokens", 0.75),
    )


def rewards_failed(evidence: Evidence) -> Finding | None:
    """The reward function could not score responses."""
    share = evidence.recent("reward/failed_fraction")
    if share is None or share < FAILED:
        return None
    return Finding(
        severity="warning",
        title="Responses could not be scored",
        text=f"{share:.0%} of the responses of the last {RECENT_STEPS} steps made the reward "
        "function fail, and counted as 0; with the override below the first failure is shown.",
        remedies=("reward.on_error=stop",),
    )


def requests_aborted(evidence: Evidence) -> Finding | None:
    """The engine was drained by force."""
    values = evidence.history.get("rollout/aborted_requests").finite
    if not sum(values):
        return None
    return Finding(
        severity="warning",
        title="Requests were cut off",
        text=f"{sum(values):g} generation requests did not finish before the engine was drained.",
        remedies=evidence.scaled("rollout.drain_timeout_s", 2),
    )


def memory_did_not_move(evidence: Evidence) -> Finding | None:
    """The life cycle ran, and its figures about memory say nothing."""
    values = evidence.history.get("memory/noop_releases").finite
    if not sum(values):
        return None
    return Finding(
        severity="note",
        title="Memory did not move",
        text="SGLang on a CPU answers release and resume without freeing anything: the order of "
        "the stages was the real one, but their figures of memory and time prove nothing for a "
        "GPU.",
        remedies=("rollout.sleep=false",),
    )
