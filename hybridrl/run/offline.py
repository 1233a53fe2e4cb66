"""The loops of modes that learn from a data set: supervised fine-tuning, preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar, cast

from hybridrl.batch import PreferenceBatch, SupervisedBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.conversations import (
    ConversationPair,
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
from hybridrl.data.sampler import RowOrder
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.metrics import Metrics
from hybridrl.models.architecture import read_architecture
from hybridrl.run.loops import ProgressRecorder, Training
from hybridrl.run.rows import (
    load_eval_pairs,
    load_eval_rows,
    load_train_pairs,
    load_train_rows,
    within_epochs,
)
from hybridrl.run.workers import Workers
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.offline import OfflineTraining
from hybridrl.trainer.policy import Learner

Example = TypeVar("Example", TokenizedRow, PreferencePair, ConversationPair)


@contextmanager
def open_sft(
    config: ExperimentConfig, folder: Path, record: ProgressRecorder
) -> Iterator[Training]:
    """Load rows and tokenizer of supervised fine-tuning.

    Args:
        folder: Hugging Face folder of the model to start from.

    Raises:
        DataError: bad rows, by file and line, or no rows.
        ModelError: the tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    train_rows = load_train_rows(config, tokenizer, on_progress=record.progress)
    config = within_epochs(config, len(train_rows.rows))
    held_out: Sequence[TokenizedRow] = []
    if config.eval.every_num_steps:
        held_out = load_eval_rows(config, config.eval.own_set(), tokenizer)

    if config.sft.turns == "all":  # so that a bad one ends the run before it began
        for row in chain(train_rows.rows, held_out):
            assistant_mask(row, tokenizer)

    lay_out = partial(
        build_supervised_batch, tokenizer=tokenizer, learns_all_turns=config.sft.turns == "all"
    )
    yield _training(
        *(config, train_rows.rows, train_rows.sampler, held_out, lay_out),
        record=record,
    )


@contextmanager
def open_dpo(
    config: ExperimentConfig, folder: Path, record: ProgressRecorder
) -> Iterator[Training]:
    """Load pairs and tokenizer of direct preference optimisation; see ``open_sft``."""
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    train_pairs = load_train_pairs(config, tokenizer, on_progress=record.progress)
    config = within_epochs(config, len(train_pairs.rows))
    held_out: list[PreferencePair] = []
    if config.eval.every_num_steps:
        held_out = load_eval_pairs(config, config.eval.own_set(), tokenizer)

    yield _training(
        *(config, train_pairs.rows, train_pairs.sampler, held_out),
        build_preference_batch,
        record=record,
    )


@contextmanager
def open_reward_model(
    config: ExperimentConfig, folder: Path, record: ProgressRecorder
) -> Iterator[Training]:
    """Load pairs and tokenizer of a reward model that is trained; see ``open_sft``."""
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    train_pairs = load_train_pairs(config, tokenizer, on_progress=record.progress)
    config = within_epochs(config, len(train_pairs.rows))
    tokenize = partial(
        tokenize_conversation_pairs,
        tokenizer=tokenizer,
        pad_token_id=pad_token_of(folder, tokenizer),
        max_tokens=read_architecture(folder).max_positions,
    )
    pairs = tokenize(train_pairs.rows)
    held_out: list[ConversationPair] = []
    if config.eval.every_num_steps:
        held_out = tokenize(load_eval_pairs(config, config.eval.own_set(), tokenizer))

    yield _training(
        *(config, pairs, train_pairs.sampler, held_out),
        build_conversation_batch,
        record=record,
    )


OPEN_OFFLINE: Mapping[
    str, Callable[[ExperimentConfig, Path, ProgressRecorder], AbstractContextManager[Training]]
] = {"sft": open_sft, "dpo": open_dpo, "reward_model": open_reward_model}
"""Loads a run, by mode that learns from a data set; see ``config.offline``."""


def _training(
    config: ExperimentConfig,
    examples: Sequence[Example],
    sampler: RowOrder,
    held_out: Sequence[Example],
    lay_out: Callable[[Sequence[Example]], SupervisedBatch | PreferenceBatch],
    *,
    record: ProgressRecorder,
) -> Training:
    def loop_of(workers: Workers) -> Loop:
        training = OfflineTraining(
            learner=cast(Learner, workers["actor"]),
            examples=examples,
            lay_out=lay_out,
            sampler=sampler,
            batch_size=config.trainer.num_prompts_per_step,
            dp_size=config.num_train_groups,
            needs_reference=config.needs_reference,
            on_phase=record.phase,
        )

        def evaluate(_: int) -> Metrics:
            record.phase("evaluate")
            return training.evaluate(held_out)

        return Loop(
            take_step=lambda _: training.step(),
            evaluate=evaluate,
            recorder=record,
            num_steps=config.num_steps,
            eval_every=config.eval.every_num_steps,
            guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
        )

    return Training(config=config, stream=sampler, loop_of=loop_of)
