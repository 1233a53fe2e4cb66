"""Puts a reinforcement-learning run together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource, build_prompt_step
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.trainer.build_algorithm import (
    Algorithm,
    Parts,
    build_actor_critic,
    build_group_relative,
)
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.inputs import load_rows
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.record import RunRecord
from hybridrl.trainer.reward import TextReward
from hybridrl.trainer.samples import take_samples
from hybridrl.trainer.workers import Workers, start_workers
from hybridrl.workers.rollout.protocol import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ingredients:
    """What training and evaluation share."""

    workers: Workers
    reward: TextReward
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]


def train(config: ExperimentConfig, folder: Path, *, record: RunRecord) -> None:
    """Train the model in ``folder`` with reinforcement learning.

    Everything that can be wrong with data, tokenizer and reward function shows before a worker
    starts.
    """
    record.phase("load data")
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    source = _build_source(config, tokenizer)
    with RewardScorer(config.reward) as scorer:
        record.phase("start workers")
        with start_workers(config, folder) as workers:
            shared = _Ingredients(
                workers=workers,
                reward=TextReward(scorer, tokenizer),
                tokenizer=tokenizer,
                stop_token_ids=load_stop_token_ids(folder, tokenizer),
            )
            _build_loop(config, shared, source=source, record=record).run()
            if config.trainer.export_hf:
                record.phase("export")
                workers.policy.export_hf(record.folder / "hf")


def _build_loop(
    config: ExperimentConfig, shared: _Ingredients, *, source: PromptSource, record: RunRecord
) -> Loop:
    algorithm_of = _build_algorithm(config, shared, record)
    evaluator = _build_evaluator(config, shared) if config.eval.every_num_steps else None
    num_samples = config.tracking.num_samples_per_step

    def take_step(step: int) -> Metrics:
        report = algorithm_of(step).step(source.next())
        record.samples(step, take_samples(report, shared.tokenizer, num_samples=num_samples))
        return report.metrics() | {"data/epoch": Mean(source.epoch)}

    def evaluate() -> Metrics:
        record.phase("evaluate")
        return evaluator.evaluate() if evaluator else {}

    return Loop(
        take_step=take_step,
        evaluate=evaluate,
        recorder=record,
        num_steps=config.trainer.num_steps,
        eval_every=config.eval.every_num_steps,
        guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
    )


def _build_algorithm(
    config: ExperimentConfig, shared: _Ingredients, record: RunRecord
) -> Callable[[int], Algorithm]:
    """Return what takes step n, counted from 1."""
    rollout = config.rollout
    parts = Parts(
        policy=shared.workers.policy,
        sampling=SamplingParams(
            num_responses_per_prompt=rollout.num_responses_per_prompt,
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=shared.stop_token_ids,
        ),
        reward=shared.reward,
        on_phase=record.phase,
    )
    if shared.workers.critic is not None:
        return build_actor_critic(config, parts, shared.workers.critic)
    group_relative = build_group_relative(config, parts)
    return lambda step: group_relative


def _build_evaluator(config: ExperimentConfig, shared: _Ingredients) -> Evaluator:
    rows = load_rows(
        config.data,
        shared.tokenizer,
        split="eval",
        num_rows=config.eval.num_prompts,
        seed=config.seed,
    )
    return Evaluator(
        policy=shared.workers.policy,
        task=build_prompt_step(rows, first_index=0, seed=config.seed, stream="eval"),
        sampling=SamplingParams(
            num_responses_per_prompt=config.eval.num_responses_per_prompt,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.eval.temperature,
            stop_token_ids=shared.stop_token_ids,
        ),
        reward=shared.reward,
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
