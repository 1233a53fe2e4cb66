"""Direct preference optimisation: one optimizer step per batch of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridrl.batch import PreferenceBatch
from hybridrl.data.preferences import PreferencePair, build_preference_batch
from hybridrl.data.sampler import RowOrder
from hybridrl.metrics import Mean, Metrics
from hybridrl.trainer.clock import Clock
from hybridrl.trainer.policy import PreferenceLearner
from hybridrl.workers.train.microbatch import balance_over_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceOptimization:
    """Draws pairs, scores them with the reference, and has the learner prefer the chosen ones."""

    learner: PreferenceLearner
    pairs: Sequence[PreferencePair]
    sampler: RowOrder
    batch_size: int
    needs_reference: bool
    dp_size: int
    lay_out: Callable[..., PreferenceBatch] = build_preference_batch
    """Makes a batch of pairs; ``is_counted`` says which of them count."""

    on_phase: Callable[[str], None] | None = None

    def step(self) -> Metrics:
        """Learn from the next ``batch_size`` pairs."""
        clock = Clock(self.on_phase)
        batch = self._arrange([self.pairs[index] for index in self.sampler.draw(self.batch_size)])
        if self.needs_reference:
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

    def evaluate(self, pairs: Sequence[PreferencePair]) -> Metrics:
        """Return loss, accuracy and rewards on held-out pairs, of any number."""
        clock = Clock()
        with clock("eval"):
            metrics = self.learner.evaluate(self._arrange(pairs))
        return {**metrics, "time/eval_s": clock.metrics()["time/eval_s"]}

    def _arrange(self, pairs: Sequence[PreferencePair]) -> PreferenceBatch:
        """Balance pairs over ranks; copies that are masked out fill them up to a multiple."""
        filled = [*pairs, *[pairs[0]] * (-len(pairs) % self.dp_size)]
        lengths = [2 * len(p.token_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in filled]
        order = balance_over_ranks(lengths, dp_size=self.dp_size, num_minibatches=1)
        return self.lay_out(
            [filled[index] for index in order],
            is_counted=[index < len(pairs) for index in order],
        )
