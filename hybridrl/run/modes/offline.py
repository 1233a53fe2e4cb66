"""The loops of modes that learn from a data set: supervised fine-tuning, preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import PreferenceBatch, SupervisedBatch, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.conversations import (
    build_conversation_batch,
    pad_token_of,
    tokenize_conversation_pairs,
)
from hybridrl.data.examples import (
    PreferencePair,
    assistant_mask,
    build_preference_batch,
    build_supervised_batch,
)
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.metrics import Mean, Metrics
from hybridrl.models.architecture import read_architecture
from hybridrl.run.display import LiveView
from hybridrl.run.loops import Training
from hybridrl.run.rows import (
    TrainRows,
    load_eval_pairs,
    load_eval_rows,
    load_train_pairs,
    load_train_rows,
    within_epochs,
)
from hybridrl.run.workers import Workers
from hybridrl.trainer.loop import MAX_SKIPPED, Loop, UpdateGuard
from hybridrl.trainer.policy import Learner
from hybridrl.trainer.step_metrics import Clock
from hybridrl.trainer.train_batch import balance_over_ranks

Example = TypeVar("Example")
"""A row of the data set: one with an answer, or a pair of answers."""

Record = Callable[[int, Metrics], None]
"""Keeps the metrics of a step."""


def open_offline(
    config: ExperimentConfig, folder: Path, live: LiveView, record: Record
) -> Training:
    """Load the data set of a mode that learns from one, and its tokenizer."""
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    if config.mode == "sft":
        return _open_sft(config, tokenizer, live, record)
    pairs = load_train_pairs(config, tokenizer, on_progress=live.progress)
    config = within_epochs(config, len(pairs.rows))
    held_out: Sequence[PreferencePair] = []
    if config.eval.every_num_steps:
        held_out = load_eval_pairs(config, config.eval.own_set(), tokenizer)
    if config.mode == "dpo":
        return _OfflineTraining(
            *(pairs, held_out, build_preference_batch, live, record),
            config=config,
            stream=pairs.sampler,
        )
    tokenize = partial(
        tokenize_conversation_pairs,
        tokenizer=tokenizer,
        pad_token_id=pad_token_of(folder, tokenizer),
        max_tokens=read_architecture(folder).max_positions,
    )
    conversations = TrainRows(tokenize(pairs.rows), pairs.sampler)
    return _OfflineTraining(
        *(conversations, tokenize(held_out), build_conversation_batch, live, record),
        config=config,
        stream=pairs.sampler,
    )


def _open_sft(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, live: LiveView, record: Record
) -> Training:
    train_rows = load_train_rows(config, tokenizer, on_progress=live.progress)
    config = within_epochs(config, len(train_rows.rows))
    held_out: Sequence[TokenizedRow] = []
    if config.eval.every_num_steps:
        held_out = load_eval_rows(config, config.eval.own_set(), tokenizer)
    learns_all_turns = config.sft.turns == "all"
    if learns_all_turns:  # so that a bad one ends the run before it began
        for row in chain(train_rows.rows, held_out):
            assistant_mask(row, tokenizer)
    lay_out = partial(
        build_supervised_batch, tokenizer=tokenizer, learns_all_turns=learns_all_turns
    )
    return _OfflineTraining(
        train_rows, held_out, lay_out, live, record, config=config, stream=train_rows.sampler
    )


@dataclass(frozen=True, slots=True)
class _OfflineTraining(Training, Generic[Example]):
    """Draws examples, and has the learner learn from them."""

    learned: TrainRows[Example]
    held_out: Sequence[Example]
    lay_out: Callable[[Sequence[Example]], SupervisedBatch | PreferenceBatch]
    """Makes a batch with equally many rows for each example, in their order."""

    live: LiveView
    record: Record

    def loop_of(self, workers: Workers) -> Loop:
        learner = cast(Learner, workers["actor"])
        return Loop(
            take_step=lambda _: self._step(learner),
            evaluate=lambda _: self._evaluate(learner),
            begin_step=self.live.begin_step,
            record=self.record,
            num_steps=self.config.num_steps,
            eval_every=self.config.eval.every_num_steps,
            guard=UpdateGuard(max_skipped=MAX_SKIPPED),
        )

    def _step(self, learner: Learner) -> Metrics:
        """Learn from the next examples."""
        clock = Clock(self.live.phase)
        drawn = self.learned.sampler.draw(self.config.trainer.num_prompts_per_step)
        batch = self._arrange([self.learned.rows[index] for index in drawn])
        if self.config.needs_reference and isinstance(batch, PreferenceBatch):
            with clock("logprobs"):
                batch.reference_logprobs_B = learner.compute_reference(batch)
        with clock("update"):
            update = learner.update(batch)
        timings = clock.metrics()
        rate = update["data/train_tokens"].value / timings["time/update_s"].value
        return {
            **update,
            **timings,
            "throughput/train_tokens_per_s": Mean(rate),
            "data/epoch": Mean(self.learned.sampler.epoch),
        }

    def _evaluate(self, learner: Learner) -> Metrics:
        """Measure the loss, and for pairs accuracy and rewards, on held-out examples."""
        self.live.phase("evaluate")
        clock = Clock()
        with clock("eval"):
            metrics = learner.evaluate(self._arrange(self.held_out))
        return {**metrics, "time/eval_s": clock.metrics()["time/eval_s"]}

    def _arrange(self, examples: Sequence[Example]) -> SupervisedBatch | PreferenceBatch:
        """Balance examples over ranks; masked-out copies fill them up to a multiple."""
        dp_size = self.config.num_train_groups
        filled = [*examples, *[examples[0]] * (-len(examples) % dp_size)]
        batch = self.lay_out(filled)
        lengths_EN = row_lengths(batch.token_ids_BL).view(len(filled), -1)
        num_tokens = int(lengths_EN[: len(examples)].sum())
        batch.response_mask_BL.values()[num_tokens:] = False
        order = balance_over_ranks(
            lengths_EN.sum(dim=1).tolist(), dp_size=dp_size, num_minibatches=1
        )
        num_rows = lengths_EN.shape[1]
        return batch[[num_rows * index + row for index in order for row in range(num_rows)]]
