"""The loops of the two ways to train: reinforcement learning, and supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.files import Columns, read_rows
from hybridrl.data.prompts import TokenizedRow, tokenize_rows
from hybridrl.data.rows import Row, fingerprint
from hybridrl.data.sampler import RowSampler
from hybridrl.data.sort_digits import Split, build_sort_digits_rows
from hybridrl.data.source import PromptSource, PromptStep, build_prompt_step
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.errors import DataError
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.run.plan_check import PlanCheck
from hybridrl.run.record import RunFolder
from hybridrl.run.samples import SampleTaker
from hybridrl.run.workers import Workers
from hybridrl.trainer.build_algorithm import (
    Algorithm,
    Parts,
    build_actor_critic,
    build_group_relative,
)
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.loop import Loop, StepRecorder, UpdateGuard
from hybridrl.trainer.policy import Critic, Learner, Policy
from hybridrl.trainer.reward import TextReward
from hybridrl.trainer.sft import SupervisedFineTuning
from hybridrl.workers.rollout.protocol import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Objects that outlive the workers, which may be lost and started again."""

    stream: PromptSource | RowSampler
    """Draws the rows of each step."""

    loop_of: Callable[[Workers], Loop]
    """Makes the loop that calls these workers."""

    finish: Callable[[], None] = lambda: None
    """Logs the results after the last step."""


@contextmanager
def open_rl(config: ExperimentConfig, folder: Path, record: RunFolder) -> Iterator[Training]:
    """Load rows, tokenizer and reward function of a reinforcement-learning run.

    Args:
        config: of the run.
        folder: Hugging Face folder of the model to start from.
        record: of the run.

    Raises:
        DataError: bad rows, by file and line, or no rows.
        ModelError: the tokenizer or its stop tokens cannot be used.
        RewardError: the reward function cannot be loaded.
    """
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    stop_token_ids = load_stop_token_ids(folder, tokenizer)
    source = PromptSource(
        load_rows(config, tokenizer, split="train"),
        num_prompts=config.trainer.num_prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    held_out = None
    if config.eval.every_num_steps:
        rows = load_rows(config, tokenizer, split="eval")
        held_out = build_prompt_step(rows, first_index=0, seed=config.seed, stream="eval")
    with RewardScorer(config.reward) as scorer:
        rl = _ReinforcementLearning(
            config=config,
            record=record,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids,
            source=source,
            held_out=held_out,
            reward=TextReward(scorer, tokenizer),
            plan_check=PlanCheck(config),
        )
        yield Training(stream=source, loop_of=rl.loop_of, finish=rl.plan_check.report)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReinforcementLearning:
    config: ExperimentConfig
    record: RunFolder
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    source: PromptSource
    held_out: PromptStep | None
    """The prompts of evaluations; None without evaluations."""

    reward: TextReward
    plan_check: PlanCheck

    def loop_of(self, workers: Workers) -> Loop:
        config = self.config
        algorithm_of = self._algorithm_of(workers)
        num_samples = config.tracking.num_samples_per_step
        samples = SampleTaker(self.tokenizer, num_samples=num_samples, split="train")

        def take_step(step: int) -> Metrics:
            report = algorithm_of(step).step(self.source.next())
            self.record.samples(step, samples.take(report.task, report.rollouts, report.scores))
            metrics = report.metrics() | {
                "data/epoch": Mean(self.source.epoch),
                "data/prompts": Mean(self.source.num_drawn),
            }
            return metrics | self.plan_check.compare(metrics)

        return Loop(
            take_step=take_step,
            evaluate=self._evaluation_with(workers),
            recorder=self.record,
            num_steps=config.trainer.num_steps,
            eval_every=config.eval.every_num_steps,
            guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
        )

    def _algorithm_of(self, workers: Workers) -> Callable[[int], Algorithm]:
        """Return the function that gives the algorithm of step n, counted from 1."""
        rollout = self.config.rollout
        parts = Parts(
            policy=cast(Policy, workers["actor"]),
            sampling=SamplingParams(
                num_responses_per_prompt=rollout.num_responses_per_prompt,
                max_response_tokens=rollout.max_response_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop_token_ids=self.stop_token_ids,
            ),
            reward=self.reward,
            on_phase=self.record.phase,
        )
        if "critic" in workers:
            return build_actor_critic(self.config, parts, cast(Critic, workers["critic"]))
        group_relative = build_group_relative(self.config, parts)
        return lambda step: group_relative

    def _evaluation_with(self, workers: Workers) -> Callable[[int], Metrics]:
        if self.held_out is None:
            return lambda step: {}
        config = self.config
        evaluator = Evaluator(
            policy=cast(Policy, workers["actor"]),
            task=self.held_out,
            sampling=SamplingParams(
                num_responses_per_prompt=config.eval.num_responses_per_prompt,
                max_response_tokens=config.rollout.max_response_tokens,
                temperature=config.eval.temperature,
                stop_token_ids=self.stop_token_ids,
            ),
            reward=self.reward,
        )
        num_samples = config.tracking.num_samples_per_step
        samples = SampleTaker(self.tokenizer, num_samples=num_samples, split="eval")

        def evaluate(step: int) -> Metrics:
            self.record.phase("evaluate")
            report = evaluator.evaluate()
            self.record.samples(step, samples.take(evaluator.task, report.rollouts, report.scores))
            return report.metrics

        return evaluate


@contextmanager
def open_sft(config: ExperimentConfig, folder: Path, record: StepRecorder) -> Iterator[Training]:
    """Load rows and tokenizer of supervised fine-tuning.

    Args:
        config: of the run.
        folder: Hugging Face folder of the model to start from.
        record: of the run.

    Raises:
        DataError: bad rows, by file and line, or no rows.
        ModelError: the tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)
    rows = load_rows(config, tokenizer, split="train")
    held_out: list[TokenizedRow] = []
    if config.sft.eval_every_num_steps:
        held_out = load_rows(config, tokenizer, split="eval")
    sampler = RowSampler(
        len(rows),
        seed=config.seed,
        shuffle=config.data.shuffle,
        fingerprint=fingerprint(row.row for row in rows),
    )

    def loop_of(workers: Workers) -> Loop:
        fine_tuning = SupervisedFineTuning(
            learner=cast(Learner, workers["actor"]),
            tokenizer=tokenizer,
            rows=rows,
            sampler=sampler,
            batch_size=config.sft.batch_size,
            dp_size=config.num_train_groups,
            on_phase=record.phase,
        )

        def evaluate(_: int) -> Metrics:
            record.phase("evaluate")
            return fine_tuning.evaluate(held_out)

        return Loop(
            take_step=lambda _: fine_tuning.step(),
            evaluate=evaluate,
            recorder=record,
            num_steps=config.sft.num_steps,
            eval_every=config.sft.eval_every_num_steps,
            guard=UpdateGuard(max_skipped=config.trainer.max_skipped_updates),
        )

    yield Training(stream=sampler, loop_of=loop_of)


def load_rows(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split
) -> list[TokenizedRow]:
    """Read or make the rows of a split and tokenize their prompts.

    Files give all rows; evaluation takes the first ``eval.num_prompts``.

    Raises:
        DataError: bad rows, by file and line; or no rows to learn from or evaluate on.
    """
    data = config.data
    rows = _read(config, split=split)
    if not rows:
        raise DataError(
            f"there are no rows for {split}; set data.{split}_files to files that have some"
        )
    return tokenize_rows(
        rows,
        tokenizer,
        use_chat_template=data.use_chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
    )


def _read(config: ExperimentConfig, *, split: Split) -> Sequence[Row]:
    data = config.data
    num_rows = data.num_task_rows if split == "train" else config.eval.num_prompts
    if data.task == "sort_digits":
        return build_sort_digits_rows(
            num_rows,
            split=split,
            seed=config.seed,
            min_digits=data.min_digits,
            max_digits=data.max_digits,
        )
    columns = Columns(prompt=data.prompt_key, answer=data.answer_key, source=data.source_key)
    files = data.train_files if split == "train" else data.eval_files
    rows = read_rows([Path(file) for file in files], columns=columns, key=f"data.{split}_files")
    if split == "train":
        return rows
    learnt = {Path(file).resolve() for file in data.train_files}
    if both := [file for file in data.eval_files if Path(file).resolve() in learnt]:
        log.warning("evaluating on files that are also learnt from: %s", ", ".join(both))
    return rows[:num_rows]
