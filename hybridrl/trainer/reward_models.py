"""Rewards that models give: ranks score conversations, and served judges answer questions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RewardBatch, SupervisedBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.data.conversations import (
    lay_out_conversations,
    pad_token_of,
    render_conversation,
    tokenize_conversations,
)
from hybridrl.data.prompts import TokenizedRow, render_chat
from hybridrl.data.rows import Message
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.diagnostics import trace
from hybridrl.errors import DataError
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.child import Reward
from hybridrl.rewards.judge_reader import JudgeAnswer, judge_arguments, max_context_tokens
from hybridrl.rewards.runner import RewardInputs
from hybridrl.sampler import RequestParams, Sample
from hybridrl.trainer.train_batch import balance_over_ranks

_COLUMN = re.compile(r"\{(prompt|response|answer|source)\}")
_Answer = TypeVar("_Answer")


class RewardRanks(Protocol):
    """A worker group whose ranks hold the reward models."""

    def compute_rewards(self, rows: SupervisedBatch, *, model: str) -> RewardBatch:
        """Score conversations with the reward model of that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModel:
    """A reward model as the driver knows it: all but its weights."""

    name: str  # of the reward, as ``reward.functions`` has it
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None
    vocab_size: int
    max_tokens: int  # its context

    def tokenize(
        self, rows: Sequence[TokenizedRow], responses: Sequence[str]
    ) -> list[list[int] | str]:
        """Return the tokens of each conversation, or why the model cannot read it."""
        texts: list[str] = []
        refused: dict[int, str] = {}
        for number, (row, response) in enumerate(zip(rows, responses, strict=True)):
            try:
                texts.append(render_conversation(row, response, self.tokenizer))
            except DataError as error:
                refused[number] = str(error)
                texts.append("")
        tokens = tokenize_conversations(texts, self.tokenizer, pad_token_id=self.pad_token_id)
        return [
            refused.get(number) or self._flaw_of(conversation) or conversation
            for number, conversation in enumerate(tokens)
        ]

    def _flaw_of(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return "the reward model's chat template renders it as no tokens"
        if len(tokens) > self.max_tokens:
            return (
                f"the conversation has {len(tokens)} tokens, and the context of the reward model "
                f"is {self.max_tokens}"
            )
        if (largest := max(tokens)) >= self.vocab_size:
            return (
                f"the reward model's tokenizer gives token {largest}, and the model knows 0 to "
                f"{self.vocab_size - 1}"
            )
        return ""


def load_reward_models(config: RewardConfig) -> tuple[RewardModel, ...]:
    """Load the tokenizers of the reward models, so that a wrong folder ends the run early."""
    models = []
    for name, path in config.model_paths.items():
        folder = Path(path)
        architecture = read_architecture(folder)
        model = RewardModel(
            name=name,
            tokenizer=load_tokenizer(folder, needs_chat_template=False),
            pad_token_id=pad_token_of(folder),
            vocab_size=architecture.vocab_size,
            max_tokens=architecture.max_positions,
        )
        models.append(model)
    return tuple(models)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """Has the ranks score conversations."""

    models: Sequence[RewardModel]
    ranks: RewardRanks
    num_groups: int  # data-parallel ranks, over which rows are divided

    def __call__(
        self, rows: Sequence[TokenizedRow], responses: Sequence[str]
    ) -> Mapping[str, list[Reward]]:
        """Return the score of each response by each model, or why there is none."""
        return {
            model.name: _answered(
                model.tokenize(rows, responses), partial(self._compute, model.name)
            )
            for model in self.models
        }

    def _compute(self, name: str, conversations: Sequence[list[int]]) -> list[float]:
        """Return scores in order; copies of the shortest make the rows divisible over the ranks."""
        num_missing = -len(conversations) % self.num_groups
        padded = [*conversations, *[min(conversations, key=len)] * num_missing]
        order = balance_over_ranks(
            [len(tokens) for tokens in padded], dp_size=self.num_groups, num_minibatches=1
        )
        rows = lay_out_conversations([padded[row] for row in order])
        rewards: list[float] = self.ranks.compute_rewards(rows, model=name).rewards_B.tolist()
        by_row = dict(zip(order, rewards, strict=True))
        return [by_row[row] for row in range(len(conversations))]


class FrozenModels(Protocol):
    """Serves frozen models."""

    def ask(
        self, model: str, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Sample | str]:
        """Return for each context the answer of a model, or why there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """A judge as the driver knows it: all but its weights."""

    name: str  # of the reward, as ``reward.functions`` has it
    model: str  # of its server, as ``serving.models`` has it
    template: str
    tokenizer: PreTrainedTokenizerBase
    params: RequestParams

    max_context_tokens: int  # of question and answer

    def questions(self, inputs: RewardInputs) -> list[list[int] | str]:
        """Return the tokens of the question about each response, or why there is none."""
        columns = {
            "prompt": inputs.prompts,
            "response": inputs.responses,
            "answer": inputs.answers,
            "source": inputs.sources,
        }
        rows = zip(*columns.values(), strict=True)
        return [self._question(dict(zip(columns, row, strict=True))) for row in rows]

    def read(self, sample: Sample | str) -> JudgeAnswer:
        """Return the text of an answer, or why there is none."""
        if isinstance(sample, str):
            return JudgeAnswer(failure=sample)
        tokens = sample.token_ids.tolist()
        return JudgeAnswer(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))

    def _question(self, row: Mapping[str, str]) -> list[int] | str:
        # One pass: braces in a response are its own.
        text = _COLUMN.sub(lambda match: row[match[1]], self.template)
        has_template = bool(self.tokenizer.chat_template)
        try:
            if has_template:
                chat = [Message("user", text)]
                text = render_chat(chat, self.tokenizer, origin=f"question to {self.model}")
        except DataError as error:
            return str(error)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=not has_template)["input_ids"]
        if len(tokens) >= self.max_context_tokens:
            key = f"serving.models.{self.model}.max_context_tokens"
            return (
                f"the question has {len(tokens)} tokens, and {key}={self.max_context_tokens} must "
                f"hold an answer, too; set {key}={len(tokens) + self.params.max_new_tokens}"
            )
        return tokens or "the question has no tokens in the vocabulary of the judge"


def load_judges(config: ExperimentConfig) -> tuple[Judge, ...]:
    """Load the tokenizers of the judges, so that a wrong folder ends the run early."""
    judges = []
    for name, spelled in config.reward.judges.items():
        args = judge_arguments(spelled)
        model = str(args["model"])
        folder = Path(str(config.serving.models[model].path))
        tokenizer = load_tokenizer(folder, needs_chat_template=False)
        judge = Judge(
            name=name,
            model=model,
            template=str(args["template"]),
            tokenizer=tokenizer,
            params=RequestParams(
                max_new_tokens=int(args["max_tokens"]),
                temperature=float(args["temperature"]),
                top_p=float(args["top_p"]),
                stop_token_ids=load_stop_token_ids(folder, tokenizer),
            ),
            max_context_tokens=max_context_tokens(config, model),
        )
        judges.append(judge)
    return tuple(judges)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeAnswers:
    """Has judges answer about responses."""

    judges: Sequence[Judge]
    servers: FrozenModels
    timeout_s: float  # seconds that all answers of a judge may take

    def __call__(self, inputs: RewardInputs) -> Mapping[str, list[JudgeAnswer]]:
        """Return the answers of each judge, by the name of its reward."""
        answers = {}
        for judge in self.judges:
            samples = _answered(judge.questions(inputs), partial(self._ask, judge))
            answers[judge.name] = [judge.read(sample) for sample in samples]
        return answers

    def _ask(self, judge: Judge, questions: Sequence[list[int]]) -> Sequence[Sample | str]:
        contexts = [torch.tensor(question) for question in questions]
        with trace.span("judge", rows=len(contexts)):
            return self.servers.ask(judge.model, contexts, judge.params, timeout_s=self.timeout_s)


def _answered(
    questions: Sequence[list[int] | str],
    answer: Callable[[Sequence[list[int]]], Sequence[_Answer | str]],
) -> list[_Answer | str]:
    """Return an answer to each question; a text stays, since it says why there is no question."""
    readable = [question for question in questions if not isinstance(question, str)]
    answers = iter(answer(readable) if readable else [])
    return [each if isinstance(each, str) else next(answers) for each in questions]
