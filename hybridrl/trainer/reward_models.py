"""Rewards that models give: the driver renders conversations, the ranks score them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RewardBatch, SupervisedBatch
from hybridrl.config.reward import RewardConfig
from hybridrl.data.conversations import (
    lay_out_conversations,
    pad_token_of,
    render_conversation,
    tokenize_conversations,
)
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import DataError
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.child import Reward
from hybridrl.trainer.balance import balance_over_ranks


class RewardRanks(Protocol):
    """A worker group whose ranks hold the reward models."""

    def compute_rewards(self, rows: SupervisedBatch, *, model: str) -> RewardBatch:
        """Score conversations with the reward model of that name."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModel:
    """A reward model as the driver knows it: all but its weights."""

    name: str
    """Of the reward, as ``reward.functions`` has it."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None
    vocab_size: int
    max_tokens: int
    """Its context."""

    @classmethod
    def load(cls, name: str, folder: Path) -> RewardModel:
        """Load what the driver needs.

        Raises:
            ModelError: the folder has no usable configuration or tokenizer.
        """
        architecture = read_architecture(folder)
        return cls(
            name=name,
            tokenizer=load_tokenizer(folder, needs_chat_template=False),
            pad_token_id=pad_token_of(folder),
            vocab_size=architecture.vocab_size,
            max_tokens=architecture.max_positions,
        )

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
    return tuple(RewardModel.load(name, Path(path)) for name, path in config.model_paths.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """Has the ranks score conversations."""

    models: Sequence[RewardModel]
    ranks: RewardRanks
    num_groups: int
    """Data-parallel ranks, over which rows are divided."""

    def __call__(
        self, rows: Sequence[TokenizedRow], responses: Sequence[str]
    ) -> Mapping[str, list[Reward]]:
        """Return the score of each response by each model, or why there is none."""
        return {model.name: self._score(model, rows, responses) for model in self.models}

    def _score(
        self, model: RewardModel, rows: Sequence[TokenizedRow], responses: Sequence[str]
    ) -> list[Reward]:
        conversations = model.tokenize(rows, responses)
        readable = [tokens for tokens in conversations if not isinstance(tokens, str)]
        scores = iter(self._compute(model.name, readable) if readable else [])
        return [tokens if isinstance(tokens, str) else next(scores) for tokens in conversations]

    def _compute(self, name: str, conversations: list[list[int]]) -> list[float]:
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
