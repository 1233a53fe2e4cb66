"""Puts a run of supervised fine-tuning together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from hybridrl.checkpoint.manifest import RunFingerprint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import fingerprint
from hybridrl.data.sampler import RowSampler
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.metrics import Metrics
from hybridrl.models.folder import require_usable_model
from hybridrl.run.checkpoints import Saver
from hybridrl.run.cluster import rank_variables, start_group
from hybridrl.run.export import export
from hybridrl.run.inputs import load_rows
from hybridrl.run.record import RunFolder
from hybridrl.run.restarts import with_restarts
from hybridrl.run.resume import check_resumable, newest_step, run_fingerprint, run_resumable
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.policy import Learner
from hybridrl.trainer.sft import SupervisedFineTuning
from hybridrl.workers.build import TrainSpec
from hybridrl.workers.supervised import SupervisedWorker


def train_sft(config: ExperimentConfig, folder: Path, *, record: RunFolder) -> None:
    """Fine-tune the model in ``folder`` on prompts and answers, or go on where the run ended.

    Raises:
        CheckpointError: there is a checkpoint, and it is of another run.
    """
    require_usable_model(folder)
    examples = _load_examples(config, folder, record=record)
    origin = run_fingerprint(config, folder)
    check_resumable(config, origin, rows=examples.sampler.state())
    with_restarts(
        lambda: _tune_once(config, folder, examples=examples, origin=origin, record=record),
        explain=record.explain,
        newest_step=lambda: newest_step(config),
        max_in_a_row=config.checkpoint.max_restarts,
    )


def _tune_once(
    config: ExperimentConfig,
    folder: Path,
    *,
    examples: _Examples,
    origin: RunFingerprint,
    record: RunFolder,
) -> None:
    record.phase("start workers")
    spec, variables = _build_spec(config, folder), rank_variables(config)
    with start_group(config.cluster, SupervisedWorker, spec, variables=variables) as group:
        learner = cast(Learner, group)
        loop = _build_loop(config, learner, examples=examples, record=record)
        with loop.interrupt.listening():  # until all is written
            has_learnt = run_resumable(
                config,
                loop,
                {"actor": cast(Saver, group)},
                origin=origin,
                stream=examples.sampler,
                record=record,
            )
            record.phase("export")
            export(learner, record.folder, is_new=has_learnt, lora=config.lora)
    loop.interrupt.raise_if_unfinished()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Examples:
    """What is learnt from, and in which order."""

    tokenizer: PreTrainedTokenizerBase
    rows: list[TokenizedRow]
    held_out: list[TokenizedRow]
    sampler: RowSampler


def _load_examples(config: ExperimentConfig, folder: Path, *, record: RunFolder) -> _Examples:
    record.phase("load data")
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    rows = load_rows(
        config.data,
        tokenizer,
        split="train",
        num_rows=config.data.num_task_rows,
        seed=config.seed,
    )
    held_out: list[TokenizedRow] = []
    if config.sft.eval_every_num_steps:
        held_out = load_rows(
            config.data,
            tokenizer,
            split="eval",
            num_rows=config.eval.num_prompts,
            seed=config.seed,
        )
    sampler = RowSampler(
        len(rows),
        seed=config.seed,
        shuffle=config.data.shuffle,
        fingerprint=fingerprint(row.row for row in rows),
    )
    return _Examples(tokenizer=tokenizer, rows=rows, held_out=held_out, sampler=sampler)


def _build_loop(
    config: ExperimentConfig,
    learner: Learner,
    *,
    examples: _Examples,
    record: RunFolder,
) -> Loop:
    tuning = SupervisedFineTuning(
        learner=learner,
        tokenizer=examples.tokenizer,
        rows=examples.rows,
        sampler=examples.sampler,
        batch_size=config.sft.batch_size,
        dp_size=config.num_train_groups,
        on_phase=record.phase,
    )

    def evaluate(_: int) -> Metrics:
        record.phase("evaluate")
        return tuning.evaluate(examples.held_out)

    return Loop(
        take_step=lambda _: tuning.step(),
        evaluate=evaluate,
        recorder=record,
        num_steps=config.sft.num_steps,
        eval_every=config.sft.eval_every_num_steps,
        guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
    )


def _build_spec(config: ExperimentConfig, folder: Path) -> TrainSpec:
    return TrainSpec(
        model_folder=folder.absolute(),
        model=config.model,
        actor=config.actor,
        megatron=config.megatron,
        lora=config.lora,
        seed=config.seed,
        device=config.cluster.device,
        num_total_updates=config.sft.num_steps,
        max_response_tokens=config.rollout.max_response_tokens,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )
