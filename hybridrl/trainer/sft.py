"""Supervised fine-tuning: one optimizer step per batch of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import SupervisedBatch, row_lengths, row_offsets
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.sampler import RowOrder
from hybridrl.data.supervised import build_supervised_batch
from hybridrl.metrics import Mean, Metrics
from hybridrl.trainer.clock import Clock
from hybridrl.trainer.policy import Learner
from hybridrl.workers.train.microbatch import balance_over_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedFineTuning:
    """Draws examples, and has the learner fit them."""

    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[TokenizedRow]
    sampler: RowOrder
    batch_size: int
    learns_all_turns: bool
    dp_size: int
    on_phase: Callable[[str], None] | None = None

    def step(self) -> Metrics:
        """Fit the next ``batch_size`` examples."""
        clock = Clock(self.on_phase)
        rows = [self.rows[index] for index in self.sampler.draw(self.batch_size)]
        batch = self._arrange(rows)
        with clock("update"):
            update = self.learner.fit(batch)
        timings = clock.metrics()
        rate = update["data/train_tokens"].value / timings["time/update_s"].value
        return {
            **update,
            **timings,
            "throughput/train_tokens_per_s": Mean(rate),
            "data/epoch": Mean(self.sampler.epoch),
        }

    def evaluate(self, rows: Sequence[TokenizedRow]) -> Metrics:
        """Return the loss on held-out examples."""
        clock = Clock()
        with clock("eval"):
            loss = self.learner.evaluate(self._arrange(rows))
        return {**loss, "time/eval_s": clock.metrics()["time/eval_s"]}

    def _arrange(self, rows: Sequence[TokenizedRow]) -> SupervisedBatch:
        """Balance rows over ranks; copies without loss fill them up to a multiple."""
        filled = [*rows, *[rows[0]] * (-len(rows) % self.dp_size)]
        batch = build_supervised_batch(
            filled, self.tokenizer, learns_all_turns=self.learns_all_turns
        )
        num_tokens = int(row_offsets(batch.token_ids_BL)[len(rows)])
        batch.response_mask_BL.values()[num_tokens:] = False
        lengths = row_lengths(batch.token_ids_BL).tolist()
        order = balance_over_ranks(lengths, dp_size=self.dp_size, num_minibatches=1)
        return batch[order]
