"""The evaluation sets of a run, and the evaluator that samples and scores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import build_prompt_step
from hybridrl.metrics import Metrics
from hybridrl.run.rows import load_eval_rows
from hybridrl.run.samples import SampleTaker
from hybridrl.run.workers import Workers
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller import WorkerGroup
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.evaluate import EvalTask, Evaluator
from hybridrl.trainer.policy import Generates
from hybridrl.trainer.reward_models import (
    Judge,
    JudgeAnswers,
    ModelScores,
    RewardModel,
    RewardRanks,
)


def build_eval_tasks(
    config: ExperimentConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> list[EvalTask]:
    """Load the rows of all sets.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """

    def build(settings: EvalSet) -> EvalTask:
        rows = load_eval_rows(config, settings, tokenizer)
        stream = f"eval {settings.name}" if settings.name else "eval"
        sampling = SamplingParams(
            num_responses_per_prompt=settings.num_responses_per_prompt,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop_token_ids=stop_token_ids,
        )
        task = build_prompt_step(
            rows,
            range(len(rows)),
            seed=config.seed,
            stream=stream,
            sends_rows=not config.agent.is_single_turn,
        )
        return EvalTask(settings, task, sampling)

    return [build(settings) for settings in config.eval.all_sets()]


def scores_of(
    config: ExperimentConfig, models: Sequence[RewardModel], ranks: WorkerGroup
) -> ModelScores | None:
    """Let these ranks score with the reward models; None if there are none."""
    if not models:
        return None
    return ModelScores(
        models=models, ranks=cast(RewardRanks, ranks), num_groups=config.num_train_groups
    )


def judges_of(
    config: ExperimentConfig, judges: Sequence[Judge], workers: Workers
) -> JudgeAnswers | None:
    """Let the servers of a run answer for the judges; None if there are none."""
    if not judges or workers.servers is None:
        return None
    return JudgeAnswers(judges=judges, servers=workers.servers, timeout_s=config.reward.timeout_s)


def build_evaluator(
    config: ExperimentConfig,
    policy: Generates,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
    *,
    take_agent_metrics: Callable[[], Metrics],
) -> Evaluator:
    """Build the evaluator of these responses and scores."""
    return Evaluator(
        policy=policy,
        take_agent_metrics=None if config.agent.is_single_turn else take_agent_metrics,
        reward=reward,
        tokenizer=tokenizer,
        correct_reward=config.eval.correct_reward,
        num_resamples=config.eval.num_resamples,
        seed=config.seed,
    )


def eval_sample_taker(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> SampleTaker:
    """Build the taker of some responses of each evaluation."""
    num_samples = config.tracking.num_samples_per_step
    return SampleTaker(tokenizer, num_samples=num_samples, split="eval")
