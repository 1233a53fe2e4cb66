"""Puts a reinforcement-learning run together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.checkpoint.manifest import RunFingerprint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource, PromptStep, build_prompt_step
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.metrics import Mean, Metrics
from hybridrl.models.folder import require_usable_model
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.run.export import export
from hybridrl.run.inputs import load_rows
from hybridrl.run.plan_check import PlanCheck
from hybridrl.run.record import RunFolder
from hybridrl.run.restarts import with_restarts
from hybridrl.run.resume import check_resumable, newest_step, run_fingerprint, run_resumable
from hybridrl.run.samples import SampleTaker
from hybridrl.run.workers import Workers, start_workers
from hybridrl.trainer.build_algorithm import (
    Algorithm,
    Parts,
    build_actor_critic,
    build_group_relative,
)
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.reward import TextReward
from hybridrl.workers.rollout.protocol import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunContext:
    """What outlives the workers, which may be lost and started again."""

    config: ExperimentConfig
    folder: Path
    record: RunFolder
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    source: PromptSource
    held_out: PromptStep | None
    """What is evaluated on; None where nothing is."""

    reward: TextReward
    origin: RunFingerprint


def train(config: ExperimentConfig, folder: Path, *, record: RunFolder) -> None:
    """Train the model in ``folder`` with reinforcement learning, or go on where the run ended.

    Everything that can be wrong with data, model files, tokenizer, reward function and the
    checkpoint to go on from shows before a worker starts. Lost workers are started again.

    Raises:
        CheckpointError: there is a checkpoint, and it is of another run.
    """
    record.phase("load data")
    require_usable_model(folder)
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    stop_token_ids = load_stop_token_ids(folder, tokenizer)
    source = _build_source(config, tokenizer)
    held_out = _build_held_out(config, tokenizer) if config.eval.every_num_steps else None
    origin = run_fingerprint(config, folder)
    check_resumable(config, origin, rows=source.state())
    with RewardScorer(config.reward) as scorer:
        ingredients = _RunContext(
            config=config,
            folder=folder,
            record=record,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids,
            source=source,
            held_out=held_out,
            reward=TextReward(scorer, tokenizer),
            origin=origin,
        )
        with_restarts(
            lambda: _train_once(ingredients),
            explain=record.explain,
            newest_step=lambda: newest_step(config),
            max_in_a_row=config.checkpoint.max_restarts,
        )


def _train_once(run: _RunContext) -> None:
    """Start workers, go on from the newest checkpoint to the end, and export.

    Raises:
        RunStopped: a signal ended it before its last step.
    """
    config, record = run.config, run.record
    record.phase("start workers")
    with start_workers(config, run.folder) as workers:
        watch = PlanCheck(config)
        loop = _build_loop(run, workers, watch=watch)
        with loop.interrupt.listening():  # until all is written
            has_learnt = run_resumable(
                config,
                loop,
                workers.savers,
                origin=run.origin,
                stream=run.source,
                record=record,
            )
            watch.report()
            if config.trainer.export_hf:
                record.phase("export")
                export(workers.policy, record.folder, is_new=has_learnt, lora=config.lora)
    loop.interrupt.raise_if_unfinished()


def _build_loop(run: _RunContext, workers: Workers, *, watch: PlanCheck) -> Loop:
    config, record = run.config, run.record
    algorithm_of = _build_algorithm(run, workers)
    evaluator = None
    if run.held_out is not None:
        evaluator = _build_evaluator(run, run.held_out, workers)
    num_samples = config.tracking.num_samples_per_step
    held_out = SampleTaker(run.tokenizer, num_samples=num_samples, split="eval")
    sampler = SampleTaker(run.tokenizer, num_samples=num_samples, split="train")

    def take_step(step: int) -> Metrics:
        report = algorithm_of(step).step(run.source.next())
        record.samples(step, sampler.take(report.task, report.rollouts, report.scores))
        progress: Metrics = {
            "data/epoch": Mean(run.source.epoch),
            "data/prompts": Mean(run.source.num_drawn),
        }
        metrics = report.metrics() | progress
        return metrics | watch.compare(metrics)

    def evaluate(step: int) -> Metrics:
        if evaluator is None:
            return {}
        record.phase("evaluate")
        report = evaluator.evaluate()
        record.samples(step, held_out.take(evaluator.task, report.rollouts, report.scores))
        return report.metrics

    return Loop(
        take_step=take_step,
        evaluate=evaluate,
        recorder=record,
        num_steps=config.trainer.num_steps,
        eval_every=config.eval.every_num_steps,
        guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
    )


def _build_algorithm(run: _RunContext, workers: Workers) -> Callable[[int], Algorithm]:
    """Return what takes step n, counted from 1."""
    config = run.config
    rollout = config.rollout
    parts = Parts(
        policy=workers.policy,
        sampling=SamplingParams(
            num_responses_per_prompt=rollout.num_responses_per_prompt,
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=run.stop_token_ids,
        ),
        reward=run.reward,
        on_phase=run.record.phase,
    )
    if workers.critic is not None:
        return build_actor_critic(config, parts, workers.critic)
    group_relative = build_group_relative(config, parts)
    return lambda step: group_relative


def _build_held_out(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> PromptStep:
    rows = load_rows(
        config.data,
        tokenizer,
        split="eval",
        num_rows=config.eval.num_prompts,
        seed=config.seed,
    )
    return build_prompt_step(rows, first_index=0, seed=config.seed, stream="eval")


def _build_evaluator(run: _RunContext, held_out: PromptStep, workers: Workers) -> Evaluator:
    config = run.config
    return Evaluator(
        policy=workers.policy,
        task=held_out,
        sampling=SamplingParams(
            num_responses_per_prompt=config.eval.num_responses_per_prompt,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.eval.temperature,
            stop_token_ids=run.stop_token_ids,
        ),
        reward=run.reward,
    )


def _build_source(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    rows = load_rows(
        config.data,
        tokenizer,
        split="train",
        num_rows=config.data.num_task_rows,
        seed=config.seed,
    )
    return PromptSource(
        rows,
        num_prompts=config.trainer.num_prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
