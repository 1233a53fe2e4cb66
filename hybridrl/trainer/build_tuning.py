"""Puts a run of supervised fine-tuning together; the starter model's warm-up is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.sft import SftConfig
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import fingerprint
from hybridrl.data.sampler import RowSampler
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.metrics import Metrics
from hybridrl.trainer.cluster import start_group
from hybridrl.trainer.inputs import load_rows
from hybridrl.trainer.loop import Loop, Recorder, UpdateGuard
from hybridrl.trainer.policy import Learner
from hybridrl.trainer.record import ProgressRecord, RunRecord
from hybridrl.trainer.supervised import SupervisedFineTuning
from hybridrl.workers.build import TrainSpec
from hybridrl.workers.supervised import SupervisedWorker


def tune(config: ExperimentConfig, folder: Path, *, record: Recorder, target: Path) -> None:
    """Fine-tune the model in ``folder`` on prompts and answers, and write it to ``target``."""
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
    record.phase("start workers")
    with start_group(config.cluster, SupervisedWorker, _build_spec(config, folder)) as group:
        learner = cast(Learner, group)
        tuning = SupervisedFineTuning(
            learner=learner,
            tokenizer=tokenizer,
            rows=rows,
            sampler=_build_sampler(config, rows),
            batch_size=config.sft.batch_size,
            dp_size=config.cluster.num_ranks,
        )
        _build_loop(config, tuning, held_out=held_out, record=record).run()
        record.phase("export")
        learner.export_hf(target)
        if config.lora.enabled:
            learner.export_adapter(target.with_name("adapter"))


def warm_up(config: ExperimentConfig, folder: Path, *, record: RunRecord, target: Path) -> None:
    """Teach the made model its task to the point where rewards are neither all 0 nor all 1.

    The learning rate stays constant: annealed to 0, a model this small ends in so narrow a valley
    that the first steps of policy gradient throw it out (exact match .43 -> .11 in 20 steps at lr
    5e-5, with TRL alike), while from the noisy floor of a constant rate it learns at once.
    """
    starter = config.model.starter
    if starter is None:
        raise ConfigError("model.starter", None, rule="is missing", fix="set model=starter")
    optimizer = replace(
        config.actor.optimizer,
        lr=starter.warmup_lr,
        schedule="constant",
        num_warmup_steps=starter.num_warmup_steps // 20,
        min_lr_ratio=0.0,
    )
    warmup_config = replace(
        config,
        mode="sft",
        actor=replace(config.actor, optimizer=optimizer),
        lora=replace(config.lora, enabled=False),  # the whole of what adapters start from
        sft=SftConfig(
            num_steps=starter.num_warmup_steps,
            batch_size=starter.warmup_batch_size,
            eval_every_num_steps=0,
        ),
    )
    progress = ProgressRecord(
        record, label="making the starter model, once", num_steps=starter.num_warmup_steps
    )
    tune(warmup_config, folder, record=progress, target=target)


def _build_loop(
    config: ExperimentConfig,
    tuning: SupervisedFineTuning,
    *,
    held_out: list[TokenizedRow],
    record: Recorder,
) -> Loop:
    def evaluate() -> Metrics:
        record.phase("evaluate")
        return tuning.evaluate(held_out)

    return Loop(
        take_step=lambda _: tuning.step(),
        evaluate=evaluate,
        recorder=record,
        num_steps=config.sft.num_steps,
        eval_every=config.sft.eval_every_num_steps,
        guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
    )


def _build_sampler(config: ExperimentConfig, rows: list[TokenizedRow]) -> RowSampler:
    return RowSampler(
        len(rows),
        seed=config.seed,
        shuffle=config.data.shuffle,
        fingerprint=fingerprint(row.row for row in rows),
    )


def _build_spec(config: ExperimentConfig, folder: Path) -> TrainSpec:
    return TrainSpec(
        model_folder=folder.absolute(),
        model=config.model,
        actor=config.actor,
        lora=config.lora,
        seed=config.seed,
        device=config.cluster.device,
        num_total_updates=config.sft.num_steps,
        max_response_tokens=config.rollout.max_response_tokens,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )
