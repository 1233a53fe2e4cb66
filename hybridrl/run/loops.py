"""The loop of reinforcement learning, and its evaluations; ``modes/offline.py`` has others."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.rollout import require_usable_agent
from hybridrl.algorithms.kl import KLCoefficient
from hybridrl.config.checks.batch_sizes import num_rollout_engines
from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.summary import note_of_cut_sampling
from hybridrl.data.sampler import RowOrder
from hybridrl.data.source import PromptSource, build_prompt_step
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.report import warn_of_useless_rewards
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.run.record import RunFolder
from hybridrl.run.rollouts import Recording, open_recording
from hybridrl.run.rows import lessons_of, load_eval_rows, load_train_rows, within_epochs
from hybridrl.run.samples import SampleTaker
from hybridrl.run.workers import Workers
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import AheadBatches, Batches, DrawnBatches, OversampledBatches
from hybridrl.trainer.build_algorithm import (
    Algorithm,
    Ingredients,
    build_actor_critic,
    build_policy_optimization,
)
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.evaluate import EvalReport, EvalTask, Evaluator
from hybridrl.trainer.loop import MAX_SKIPPED, Loop, UpdateGuard
from hybridrl.trainer.policy import Critic, Generates, Policy, SamplesBeside
from hybridrl.trainer.reward import EarlyRewards, TextReward
from hybridrl.trainer.reward_models import (
    JudgeAnswers,
    ModelScores,
    RewardRanks,
    load_judges,
    load_reward_models,
)
from hybridrl.trainer.rollouts import Rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(ABC):
    """Objects that outlive the workers, which may be lost and started again."""

    config: ExperimentConfig
    """Of the run, with the steps that ``trainer.num_epochs`` allows."""

    stream: PromptSource | RowOrder
    """Draws the rows of each step."""

    kl: KLCoefficient | None = None
    """The coefficient of the KL penalty, which may change from step to step."""

    advantage_state: dict[str, float] = field(default_factory=dict)
    """See ``Advantages.state``."""

    @abstractmethod
    def loop_of(self, workers: Workers) -> Loop:
        """Make the loop that calls these workers."""


@contextmanager
def open_rl(config: ExperimentConfig, folder: Path, record: RunFolder) -> Iterator[Training]:
    """Load rows, tokenizer and reward function of a reinforcement-learning run.

    ``folder`` is the Hugging Face folder of the model to start from.
    """
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    stop_token_ids = load_stop_token_ids(folder, tokenizer)
    require_usable_agent(config.agent, tokenizer, stop_token_ids=stop_token_ids)
    train_rows = load_train_rows(config, tokenizer, on_progress=record.live.progress)
    config = within_epochs(config, len(train_rows.rows))
    recording = open_recording(config, folder)
    lessons = lessons_of(config, tokenizer)
    source = PromptSource(
        train_rows.rows,
        num_prompts=recording.num_prompts(config),
        seed=config.seed,
        sampler=train_rows.sampler,
        sends_rows=not config.agent.is_single_turn,
        solve_rates=train_rows.solve_rates,
        columns=None if lessons is None else lessons.columns,
    )
    held_out = build_eval_tasks(config, tokenizer, stop_token_ids) if config.evaluates else []
    with open_rewards(config, tokenizer) as reward_of:
        yield _ReinforcementLearning(
            config=config,
            stream=source,
            kl=KLCoefficient(config.algorithm.kl, num_rows=config.num_rows_per_step),
            record=record,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids,
            held_out=held_out,
            reward_of=reward_of,
            recording=recording,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReinforcementLearning(Training):
    stream: PromptSource
    kl: KLCoefficient
    record: RunFolder
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    held_out: Sequence[EvalTask]
    """The sets of evaluations; empty without evaluations."""

    reward_of: Callable[[Workers], TextReward]
    recording: Recording

    def loop_of(self, workers: Workers) -> Loop:
        config = self.config
        rollouts = self._rollouts_of(workers)
        batches = self._batches_of(workers, rollouts)
        algorithm_of = self._algorithm_of(workers, rollouts, batches)
        num_samples = config.tracking.num_samples_per_step
        samples = SampleTaker(self.tokenizer, num_samples=num_samples, split="train")

        def take_step(step: int) -> Metrics:
            rollouts.begin(step, "train")
            self.recording.begin(self.stream, step)
            batches.begin(step)
            report = algorithm_of(step).step()
            sampled = report.sampled
            self.stream.note_rewards(
                sampled.rollouts.prompt_index_B,
                sampled.scores.rewards_B,
                is_left_out_B=sampled.scores.is_left_out_B,
            )
            taken = samples.take(sampled.task, sampled.rollouts, sampled.scores)
            self.record.samples(step, taken)
            if step == 1 and not self.advantage_state:  # of a game the players' rewards may cancel
                warn_of_useless_rewards(sampled.scores)
            metrics = report.metrics() | {
                "data/epoch": Mean(self.stream.epoch),
                "data/prompts": Mean(self.stream.num_drawn),
            }
            metrics |= {
                f"reward/baseline/{n}": Mean(mean) for n, mean in self.advantage_state.items()
            }
            rate = metrics["throughput/tokens_per_s"].value / config.num_devices
            metrics["throughput/tokens_per_device_s"] = Mean(rate)
            return metrics

        evaluation = self._evaluation_with(workers)
        return Loop(
            take_step=take_step,
            evaluate=evaluation.in_front,
            begin_evaluation=evaluation.begin if config.eval.in_background else None,
            begin_step=self.record.live.begin_step,
            record=self.record.record,
            num_steps=config.trainer.num_steps,
            eval_every=config.eval.every_num_steps,
            guard=UpdateGuard(max_skipped=MAX_SKIPPED),
        )

    def _batches_of(self, workers: Workers, rollouts: Rollouts) -> Batches:
        config, trainer = self.config, self.config.trainer
        if config.samples_ahead:
            return AheadBatches(
                source=self.stream,
                engines=cast(Policy, workers["actor"]),
                num_prompts=trainer.num_prompts_per_step,
                num_open=(trainer.max_staleness + 1) * trainer.num_prompts_per_step,
                num_steps=trainer.num_steps,
            )
        if config.oversamples:
            return OversampledBatches(
                source=self.stream,
                engines=rollouts.engines,
                num_prompts=trainer.num_prompts_per_step,
                num_open=config.num_open_prompts,
                num_engines=num_rollout_engines(config),
                num_steps=trainer.num_steps,
            )
        return DrawnBatches(
            draw=lambda: self.recording.draw(self.stream),
            engines=rollouts.engines,
            while_sampling=rollouts.reward.while_sampling,
        )

    def _rollouts_of(self, workers: Workers) -> Rollouts:
        reward = self.reward_of(workers)
        return self.recording.rollouts_of(cast(Policy, workers["actor"]), reward)

    def _algorithm_of(
        self, workers: Workers, rollouts: Rollouts, batches: Batches
    ) -> Callable[[int], Algorithm]:
        """Return the function that gives the algorithm of step n, counted from 1."""
        rollout = self.config.rollout
        if note := note_of_cut_sampling(self.config):
            log.warning(note)
        given = Ingredients(
            policy=cast(Policy, workers["actor"]),
            engines=rollouts.engines,
            batches=batches,
            sampling=SamplingParams(
                num_responses_per_prompt=rollout.num_responses_per_prompt,
                max_response_tokens=rollout.max_response_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop_token_ids=self.stop_token_ids,
                sampling_masks=rollout.sampling_masks,
                teacher_top_k=self.config.algorithm.served_top_k,
            ),
            reward=rollouts.reward,
            kl=self.kl,
            advantage_state=self.advantage_state,
            on_phase=self.record.live.phase,
        )
        if "critic" in workers:
            return build_actor_critic(self.config, given, cast(Critic, workers["critic"]))
        algorithm = build_policy_optimization(self.config, given)
        return lambda step: algorithm

    def _evaluation_with(self, workers: Workers) -> _Evaluation:
        rollouts = self._rollouts_of(workers)
        policy = cast(Policy, workers["actor"])
        evaluator = build_evaluator(
            self.config, rollouts.engines, rollouts.reward, self.tokenizer, policy
        )
        num_samples = self.config.tracking.num_samples_per_step
        return _Evaluation(
            tasks=self.held_out,
            evaluator=evaluator,
            rollouts=rollouts,
            engines=cast(SamplesBeside, workers.servers),
            samples=SampleTaker(self.tokenizer, num_samples=num_samples, split="eval"),
            record=self.record,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    """Evaluates on all sets, which are none without evaluations."""

    tasks: Sequence[EvalTask]
    evaluator: Evaluator
    rollouts: Rollouts
    engines: SamplesBeside
    """Of an asynchronous run."""

    samples: SampleTaker
    record: RunFolder

    def in_front(self, step: int) -> Metrics:
        """Evaluate after a step."""
        self.record.live.phase("evaluate")
        self.rollouts.begin(step, "eval")
        return self._keep(step, *self.evaluator.evaluate(self.tasks))

    def begin(self, step: int) -> Callable[[], Metrics]:
        """Evaluate after a step, beside the next one; what is returned waits for the metrics."""
        finish = self.evaluator.begin(self.tasks, self.engines)

        def wait() -> Metrics:
            self.record.live.phase("evaluate")
            return self._keep(step, *finish())

        return wait

    def _keep(self, step: int, reports: Sequence[EvalReport], metrics: Metrics) -> Metrics:
        for report in reports:
            self.record.samples(step, self.samples.take_report(report))
        return metrics


def build_eval_tasks(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...]
) -> list[EvalTask]:
    """Load the rows of all sets; raises a DataError for bad ones, by file and line, or none."""

    def build(settings: EvalSet) -> EvalTask:
        rows = load_eval_rows(config, settings, tokenizer)
        stream = f"eval {settings.name}" if settings.name else "eval"
        sampling = SamplingParams(
            num_responses_per_prompt=settings.num_responses_per_prompt,
            max_response_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
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


@contextmanager
def open_rewards(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Callable[[Workers], TextReward]]:
    """Load what scores responses; yields the function that joins it with the run's workers."""
    models, judges = load_reward_models(config.reward), load_judges(config)
    # An evaluation of a model counts conversations that broke off, and continues.
    max_failed = 1.0 if config.mode == "eval" else config.agent.max_failed_fraction
    with RewardScorer(config.reward) as scorer, EarlyRewards(scorer, tokenizer) as early:

        def reward_of(workers: Workers) -> TextReward:
            by_models, by_judges = None, None
            if models:
                ranks, num_groups = cast(RewardRanks, workers["actor"]), config.num_train_groups
                by_models = ModelScores(models=models, ranks=ranks, num_groups=num_groups)
            if judges and workers.servers is not None:
                limit_s = config.reward.timeout_s
                by_judges = JudgeAnswers(judges=judges, servers=workers.servers, timeout_s=limit_s)
            return TextReward(scorer, tokenizer, by_models, early, by_judges, max_failed)

        yield reward_of


def build_evaluator(
    config: ExperimentConfig,
    engines: Generates,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
) -> Evaluator:
    """Build the evaluator of these responses and scores."""
    return Evaluator(
        policy=engines,
        take_agent_metrics=None if config.agent.is_single_turn else policy.take_agent_metrics,
        reward=reward,
        tokenizer=tokenizer,
        correct_reward=config.eval.correct_reward,
        num_resamples=1000,  # the ends of intervals are stable to a few percent
        seed=config.seed,
    )
