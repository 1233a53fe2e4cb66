"""Modes that learn from a data set: one optimizer step per batch of its rows or pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybridrl.batch import PreferenceBatch, SupervisedBatch, row_lengths
from hybridrl.data.sampler import RowOrder
from hybridrl.metrics import Mean, Metrics
from hybridrl.trainer.balance import balance_over_ranks
from hybridrl.trainer.policy import Learner
from hybridrl.trainer.step_metrics import Clock

Example = TypeVar("Example")
"""A row of the data set: one with an answer, or a pair of answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineTraining(Generic[Example]):
    """Draws examples, and has the learner learn from them."""

    learner: Learner
    examples: Sequence[Example]
    lay_out: Callable[[Sequence[Example]], SupervisedBatch | PreferenceBatch]
    """Makes a batch with equally many rows for each example, in their order."""

    sampler: RowOrder
    batch_size: int
    """Examples of a step."""

    dp_size: int
    needs_reference: bool = False
    """Whether the loss of pairs reads log-probs of the reference."""

    on_phase: Callable[[str], None] | None = None

    def step(self) -> Metrics:
        """Learn from the next ``batch_size`` examples."""
        clock = Clock(self.on_phase)
        drawn = self.sampler.draw(self.batch_size)
        batch = self._arrange([self.examples[index] for index in drawn])
        if self.needs_reference and isinstance(batch, PreferenceBatch):
            with clock("logprobs"):
                batch.reference_logprobs_B = self.learner.compute_reference(batch)
        with clock("update"):
            update = self.learner.update(batch)
        timings = clock.metrics()
        rate = update["data/train_tokens"].value / timings["time/update_s"].value
        return {
            **update,
            **timings,
            "throughput/train_tokens_per_s": Mean(rate),
            "data/epoch": Mean(self.sampler.epoch),
        }

    def evaluate(self, examples: Sequence[Example]) -> Metrics:
        """Measure the loss, and for pairs accuracy and rewards, on held-out examples."""
        clock = Clock()
        with clock("eval"):
            metrics = self.learner.evaluate(self._arrange(examples))
        return {**metrics, "time/eval_s": clock.metrics()["time/eval_s"]}

    def _arrange(self, examples: Sequence[Example]) -> SupervisedBatch | PreferenceBatch:
        """Balance examples over ranks; masked-out copies fill them up to a multiple."""
        filled = [*examples, *[examples[0]] * (-len(examples) % self.dp_size)]
        batch = self.lay_out(filled)
        lengths_EN = row_lengths(batch.token_ids_BL).view(len(filled), -1)
        num_tokens = int(lengths_EN[: len(examples)].sum())
        batch.response_mask_BL.values()[num_tokens:] = False
        order = balance_over_ranks(
            lengths_EN.sum(dim=1).tolist(), dp_size=self.dp_size, num_minibatches=1
        )
        num_rows = lengths_EN.shape[1]
        return batch[[num_rows * index + row for index in order for row in range(num_rows)]]
