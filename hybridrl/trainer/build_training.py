"""Puts a reinforcement-learning run together from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import TrainBatch, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource, build_prompt_step
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.trainer.advantages import GroupRelative, GroupRelativeWithKL
from hybridrl.trainer.cluster import start_group
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.inputs import load_rows
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.policy import Policy, WithoutLogprobs
from hybridrl.trainer.record import RunRecord
from hybridrl.trainer.reward import TextReward
from hybridrl.trainer.samples import take_samples
from hybridrl.trainer.step import Advantages, PolicyOptimization
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.build import ActorRolloutSpec
from hybridrl.workers.rollout.protocol import SamplingParams
from hybridrl.workers.train.microbatch import balance_over_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ingredients:
    """What training and evaluation share."""

    policy: Policy
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
        with start_group(config.cluster, ActorRolloutWorker, _build_spec(config, folder)) as group:
            shared = _Ingredients(
                policy=cast(Policy, group),
                reward=TextReward(scorer, tokenizer),
                tokenizer=tokenizer,
                stop_token_ids=load_stop_token_ids(folder, tokenizer),
            )
            _build_loop(config, shared, source=source, record=record).run()
            if config.trainer.export_hf:
                record.phase("export")
                shared.policy.export_hf(record.folder / "hf")
                if config.lora.enabled:
                    shared.policy.export_adapter(record.folder / "adapter")


def _build_loop(
    config: ExperimentConfig, shared: _Ingredients, *, source: PromptSource, record: RunRecord
) -> Loop:
    algorithm = _build_algorithm(config, shared, record)
    evaluator = _build_evaluator(config, shared) if config.eval.every_num_steps else None
    num_samples = config.tracking.num_samples_per_step

    def take_step(step: int) -> Metrics:
        report = algorithm.step(source.next())
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
) -> PolicyOptimization:
    algorithm, rollout = config.algorithm, config.rollout
    needs_logprobs = algorithm.old_logprobs == "recompute" or algorithm.kl.placement != "none"
    dp_size = config.cluster.num_ranks

    def arrange(batch: TrainBatch) -> TrainBatch:
        lengths = row_lengths(batch.token_ids_BL).tolist()
        order = balance_over_ranks(
            lengths, dp_size=dp_size, num_minibatches=algorithm.num_minibatches
        )
        return batch[order]

    return PolicyOptimization(
        policy=shared.policy,
        sampling=SamplingParams(
            num_responses_per_prompt=rollout.num_responses_per_prompt,
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=shared.stop_token_ids,
        ),
        reward=shared.reward,
        logprobs=shared.policy.compute_logprobs if needs_logprobs else WithoutLogprobs(),
        advantages=_build_advantages(config),
        arrange=arrange,
        on_phase=record.phase,
    )


def _build_advantages(config: ExperimentConfig) -> Advantages:
    group = GroupRelative(
        num_responses=config.rollout.num_responses_per_prompt,
        divide_by_std=config.algorithm.divide_by_std,
    )
    if config.algorithm.kl.placement == "reward":
        return GroupRelativeWithKL(group=group, kl=config.algorithm.kl)
    return group


def _build_evaluator(config: ExperimentConfig, shared: _Ingredients) -> Evaluator:
    rows = load_rows(
        config.data,
        shared.tokenizer,
        split="eval",
        num_rows=config.eval.num_prompts,
        seed=config.seed,
    )
    return Evaluator(
        policy=shared.policy,
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


def _build_spec(config: ExperimentConfig, folder: Path) -> ActorRolloutSpec:
    return ActorRolloutSpec(
        model_folder=folder.absolute(),
        model=config.model,
        actor=config.actor,
        lora=config.lora,
        seed=config.seed,
        rollout=config.rollout,
        algorithm=config.algorithm,
        device=config.cluster.device,
        num_total_updates=config.trainer.num_steps * config.algorithm.num_updates_per_step,
        max_response_tokens=config.rollout.max_response_tokens,
        max_context_tokens=config.max_row_tokens,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )
