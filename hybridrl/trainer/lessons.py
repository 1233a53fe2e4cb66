"""Teachers of rows, and the prompts that these read. Legend: B rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import jagged
from hybridrl.data.prompts import TokenizedRow
from hybridrl.errors import DataError
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import Batches, Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtBatches:
    """Batches whose responses have what their teachers need."""

    batches: Batches
    numbers: Mapping[str, int]
    """Of the teacher, by source of the row; of an empty one: of all others."""

    prompts_of: Callable[[Sequence[TokenizedRow]], list[Tensor]] | None
    """Tokens of the teacher's prompt to each row; None: the policy's."""

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Sample, and add the columns of teachers; DataError for a row that has none."""
        task, rollouts = self.batches(sampling)
        num_responses = len(rollouts) // len(task.rows)
        numbers = torch.tensor([self._number_of(row) for row in task.rows])
        rollouts.teacher_B = numbers.repeat_interleave(num_responses)
        if self.prompts_of is not None:
            prompts = self.prompts_of(task.rows)
            each = [prompt for prompt in prompts for _ in range(num_responses)]
            rollouts.teacher_prompt_BN = jagged(each)
        return task, rollouts

    def _number_of(self, row: TokenizedRow) -> int:
        number = self.numbers.get(row.row.source, self.numbers.get(""))
        if number is None:
            raise DataError(
                f"{row.row.origin}: a row of source {row.row.source!r}, for which "
                "algorithm.teacher_paths has no teacher; add it there, or set "
                "algorithm.teacher_path, which teaches all others"
            )
        return number
