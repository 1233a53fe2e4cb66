"""Findings: advice of an experienced user about a run, each with overrides to type.

A rule looks at the last steps and is silent unless it is sure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from hybridrl.report.run import Run
from hybridrl.serving.health import LOST, REPLACED

RECENT_STEPS = 10
"""A present value is the mean over this many steps."""

ENOUGH_STEPS = 30
"""A rule about a trend needs this many steps."""

LR = "actor.optimizer.lr"
GENERATE_SHARE = 0.75
FULL_SLOTS = 0.9
LOG_LINES = 12

_ERROR_MARK = "the run ended with an error"
_STOPPED = "RunInterrupted: "
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


Rule = Callable[[Run], Finding | None]


def diagnose(run: Run, rules: tuple[Rule, ...]) -> list[Finding]:
    """Apply rules; errors first, then warnings, then notes."""
    order = ("error", "warning", "note")
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
    if _STOPPED in text:
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
    if not generate or generate < GENERATE_SHARE * step:
        return None
    text = f"generate takes {generate:.3g} of {step:.3g} s of a step. Its decoding slots are "
    occupancy, remedy = recent(run, "rollout/slot_occupancy"), "rollout.num_slots*2"
    if occupancy > FULL_SLOTS:
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


RUNNING_RULES: tuple[Rule, ...] = (
    *(ended_with_error, sampler_differs, rewards_failed, requests_aborted),
    *(engines_lost, generate_dominates, memory_did_not_move),
)
