"""The prompts of a step, for workers and driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.batch import PromptBatch
from hybridrl.data.prompts import TokenizedRow
from hybridrl.single_controller.payload import concat_rows


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The prompts of one step, twice: for the workers, and with their answers for the driver."""

    prompts: PromptBatch
    rows: tuple[TokenizedRow, ...]

    @staticmethod
    def join(steps: Sequence[PromptStep]) -> PromptStep:
        """Put the prompts of several, at least one, into one."""
        if len(steps) == 1:
            return steps[0]
        return PromptStep(
            concat_rows([step.prompts for step in steps]),
            tuple(row for step in steps for row in step.rows),
        )
