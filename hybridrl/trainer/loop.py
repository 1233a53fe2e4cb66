"""The loop around the step: evaluation, records, and when to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hybridrl.diagnostics import trace
from hybridrl.errors import TrainingError
from hybridrl.metrics import Metrics
from hybridrl.trainer.interrupt import Interrupt

log = logging.getLogger(__name__)

_SKIPPED = ("policy/skipped_updates", "critic/skipped_updates")


class Save(Protocol):
    """Saves the state with which a run resumes; see ``Checkpointer.after_step``."""

    def __call__(self, step: int, metrics: Metrics, *, is_last: bool) -> Metrics:
        """Save if it is due; return the metrics of the save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Steps, with evaluation before the first, after every ``eval_every`` and after the last."""

    take_step: Callable[[int], Metrics]  # does step n, from 1
    evaluate: Callable[[int], Metrics]  # evaluates after step n; 0 is before the first
    # begins the evaluation after step n, beside the next step; what it returns waits for the
    # metrics. None: training waits for each evaluation.
    begin_evaluation: Callable[[int], Callable[[], Metrics]] | None = None
    # hears of the metrics of an evaluation that ended behind its step
    note_evaluation: Callable[[int, Metrics], None] = lambda step, metrics: None
    begin_step: Callable[[int], None]  # announces step n
    # keeps the metrics of step n; 0 is before the first update
    record: Callable[[int, Metrics], None]
    num_steps: int
    eval_every: int  # steps between evaluations; 0 is never
    guard: UpdateGuard
    save: Save | None = None  # None where work is repeated, not resumed
    first_step: int = 1  # above 1 where a run resumes from a checkpoint
    interrupt: Interrupt = field(default_factory=Interrupt)

    def run(self) -> int:
        """Run to the end, or until somebody interrupts. Returns the number of steps done.

        Raises:
            TrainingError: too many consecutive updates had gradients that are not finite.
            CheckpointError: checkpoints can no longer be written.
        """
        with self.interrupt.listening():
            if self.eval_every and self.first_step == 1 and self.begin_evaluation is None:
                self.record(0, self.evaluate(0))
            cost_of_saving: Metrics = {}
            for step in trace.each("step", range(self.first_step, self.num_steps + 1)):
                self.begin_step(step)
                metrics = self._take_step(step) | cost_of_saving
                # No step follows the last one, beside which it could be evaluated.
                in_front = self.begin_evaluation is None or step == self.num_steps
                if in_front and self._evaluates_after(step):
                    metrics = metrics | self.evaluate(step)
                self.record(step, metrics)
                self.guard.check(metrics)
                # Asked once: a signal during the save ends the run after the next step, saved.
                is_stopping = self.interrupt.is_set
                is_last = is_stopping or step == self.num_steps
                if self.save is not None:
                    cost_of_saving = self.save(step, metrics, is_last=is_last)
                if is_stopping:
                    log.warning("stopped on request: step=%d of=%d", step, self.num_steps)
                    if step < self.num_steps:
                        self.interrupt.note_unfinished()
                    return step
        return self.num_steps

    def _take_step(self, step: int) -> Metrics:
        """Take a step, perhaps beside the evaluation of the policy before it.

        A run that resumes evaluates the policy of its checkpoint: the lines of an evaluation that
        had ended are behind those of the checkpoint, so they are gone.
        """
        if self.begin_evaluation is None or not self._evaluates_after(step - 1):
            return self.take_step(step)
        finish = self.begin_evaluation(step - 1)
        metrics = self.take_step(step)
        evaluation = finish()
        self.record(step - 1, evaluation)
        self.note_evaluation(step - 1, evaluation)
        return metrics

    def _evaluates_after(self, step: int) -> bool:
        return bool(self.eval_every) and (step % self.eval_every == 0 or step == self.num_steps)


MAX_SKIPPED = 5
"""A batch now and then overflows; a policy that is broken skips every update."""


class UpdateGuard:
    """Allows ``max_skipped`` steps in a row that skip an update: loss or gradient not finite."""

    def __init__(self, *, max_skipped: int, num_skipped: int = 0) -> None:
        self._max_skipped = max_skipped
        self.num_skipped = num_skipped  # steps in a row up to now

    def check(self, metrics: Metrics) -> None:
        """Look at the metrics of a step; raises TrainingError after too many."""
        if not any(metrics[name].value for name in _SKIPPED if name in metrics):
            self.num_skipped = 0
            return
        self.num_skipped += 1
        log.warning("skipped an update: loss or gradient not finite, in_a_row=%d", self.num_skipped)
        if self.num_skipped > self._max_skipped:
            raise TrainingError(
                f"{self.num_skipped} steps in a row had an update without a finite loss or "
                f"gradient, and at most {self._max_skipped} may be skipped; lower "
                "actor.optimizer.lr (or critic.optimizer.lr, see critic/skipped_updates), or set "
                "actor.compute_dtype=float32"
            )
