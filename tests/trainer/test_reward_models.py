"""Reward models on the driver: the text they read, its division over ranks, and bad scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.batch import RewardBatch, SupervisedBatch, row_lengths
from hybridrl.config.reward import RewardConfig, RewardPart
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ModelError, RewardError
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.trainer.reward_models import ModelScores, load_reward_models
from tests.tiny_models import make_tiny_classifier

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('no systems') if messages[0].role == 'system' }}" + CHAT


@dataclass
class Ranks:
    """Scores a conversation by its length, and records what it was given."""

    batches: list[SupervisedBatch] = field(default_factory=list)
    score: Callable[[int], float] = float

    def compute_rewards(self, rows: SupervisedBatch, *, model: str) -> RewardBatch:
        assert model == "model"
        self.batches.append(rows)
        lengths = (row_lengths(rows.token_ids_BL) - 1).tolist()
        scores = torch.tensor([self.score(length) for length in lengths])
        return RewardBatch(rewards_B=scores, batch_size=[len(rows)])

    @property
    def conversations(self) -> list[list[int]]:
        """Every row without the token behind its end."""
        rows = [row.tolist() for batch in self.batches for row in batch.token_ids_BL.unbind()]
        return [row[:-1] for row in rows]


def scorer_folder(tmp_path: Path, *, chat_template: str | None = None, **changes: Any) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 260, **changes}
    folder = make_tiny_classifier(tmp_path / "scorer", **sizes)
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def reward_config(folder: Path, *, on_error: str = "stop", **args: float) -> RewardConfig:
    return RewardConfig(
        function="model",
        args={"path": str(folder), **args},
        functions={},
        num_processes=1,
        timeout_s=5.0,
        on_error=on_error,  # type: ignore[arg-type]
    )


def row_of(prompt: str | tuple[Message, ...]) -> TokenizedRow:
    row = Row(prompt=prompt, answer="-", source="s", origin="file:1")
    return TokenizedRow(row, str(prompt), torch.tensor([1]))


def rewards_of(
    config: RewardConfig, ranks: Ranks, rows: list[TokenizedRow], responses: list[str]
) -> list[float]:
    models = ModelScores(models=load_reward_models(config), ranks=ranks, num_groups=2)
    inputs = RewardInputs(
        responses=responses,
        answers=["-"] * len(rows),
        prompts=[row.prompt_text for row in rows],
        sources=["s"] * len(rows),
        lengths=[1] * len(rows),
    )
    with RewardScorer(config) as scorer:
        scores = scorer.score(inputs, model_scores=models(rows, responses))
    rewards: list[float] = scores.rewards_B.tolist()
    return rewards


def text_of(conversation: list[int]) -> str:
    text: str = build_starter_tokenizer().decode(conversation)
    return text


def test_text_follows_the_prompt_and_ends_without_a_template(tmp_path: Path) -> None:
    config, ranks = reward_config(scorer_folder(tmp_path)), Ranks()
    rewards_of(config, ranks, [row_of("3 1="), row_of("9=")], ["13", ""])
    end = build_starter_tokenizer().eos_token
    assert {text_of(row) for row in ranks.conversations} == {f"3 1=13{end}", f"9={end}"}


def test_a_chat_is_rendered_by_the_template_of_the_reward_model(tmp_path: Path) -> None:
    ranks = Ranks()
    chat = (Message("system", "sort"), Message("user", "31"))
    config = reward_config(scorer_folder(tmp_path, chat_template=CHAT))
    rewards_of(config, ranks, [row_of("21"), row_of(chat)], ["12", ""])
    texts = {"<user>21<assistant>12", "<system>sort<user>31<assistant>"}
    assert {text_of(row) for row in ranks.conversations} == texts


def test_padding_at_the_end_does_not_count(tmp_path: Path) -> None:
    end = build_starter_tokenizer().eos_token_id
    ranks = Ranks()
    config = reward_config(scorer_folder(tmp_path, pad_token_id=end))
    rewards_of(config, ranks, [row_of("1="), row_of("2=")], ["1", "2"])
    assert {text_of(row) for row in ranks.conversations} == {"1=1", "2=2"}


@pytest.mark.parametrize("num_rows", [1, 5, 6])
def test_scores_return_in_order_from_rows_balanced_over_ranks(
    tmp_path: Path, num_rows: int
) -> None:
    ranks = Ranks()
    config = reward_config(scorer_folder(tmp_path), mean=3.0, std=2.0)
    responses = ["x" * length for length in (9, 1, 30, 2, 4, 17)][:num_rows]
    rewards = rewards_of(config, ranks, [row_of("p")] * num_rows, responses)
    assert rewards == [(1 + len(text) + 1 - 3) / 2 for text in responses]
    [batch] = ranks.batches
    assert len(batch) == num_rows + num_rows % 2
    if num_rows == 6:
        halves = (row_lengths(batch.token_ids_BL) - 1).view(2, -1).sum(dim=1).tolist()
        assert abs(halves[0] - halves[1]) <= 10
    ends = batch.response_mask_BL.unbind()
    assert all(mask.nonzero().tolist() == [[len(mask) - 1]] for mask in ends)


BAD = [
    (["fine", "x" * 200], {}, "has 202 tokens, and the context of the reward model is 128"),
    (["fine", "\x7f"], {"vocab_size": 122}, "gives token 221, and the model knows 0 to 121"),
]


@pytest.mark.parametrize(("responses", "changes", "words"), BAD)
def test_a_conversation_that_cannot_be_read_fails_alone(
    tmp_path: Path, responses: list[str], changes: dict[str, int], words: str
) -> None:
    folder = scorer_folder(tmp_path, chat_template=CHAT.replace("<{{ m.role }}>", ""), **changes)
    rows = [row_of("p=")] * 2
    with pytest.raises(RewardError, match=words):
        rewards_of(reward_config(folder), Ranks(), rows, responses)
    ranks = Ranks()
    assert rewards_of(reward_config(folder, on_error="zero"), ranks, rows, responses) == [6.0, 0.0]


def test_a_chat_that_the_template_rejects_fails_alone(tmp_path: Path) -> None:
    folder = scorer_folder(tmp_path, chat_template=STRICT)
    rows = [row_of((Message("system", "s"), Message("user", "u"))), row_of("p")]
    config = reward_config(folder, on_error="zero")
    assert rewards_of(config, Ranks(), rows, ["a", "b"]) == [0.0, len("<user>p<assistant>b")]
    with pytest.raises(RewardError, match="no systems"):
        rewards_of(reward_config(folder), Ranks(), rows, ["a", "b"])


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e30])
def test_a_score_that_training_cannot_use_follows_on_error(tmp_path: Path, score: float) -> None:
    folder = scorer_folder(tmp_path)
    ranks = Ranks(score=lambda length: score if length == 4 else 1.0)
    rows, responses = [row_of("p=")] * 2, ["1", "12"]
    with pytest.raises(RewardError, match=r"reward\.function=model: response 0 '1'"):
        rewards_of(reward_config(folder), ranks, rows, responses)
    assert rewards_of(reward_config(folder, on_error="zero"), ranks, rows, responses) == [0.0, 1.0]


def test_each_reward_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    folders = [scorer_folder(tmp_path / name) for name in "ab"]
    parts = {
        name: RewardPart(function="model", weight=weight, args={"path": str(folder)})
        for name, weight, folder in zip("ab", (1.0, -1.0), folders, strict=True)
    }
    config = reward_config(folders[0])
    several = RewardConfig(
        function=None,
        args={},
        functions=parts,
        num_processes=1,
        timeout_s=config.timeout_s,
        on_error="stop",
    )
    assert [model.name for model in load_reward_models(several)] == ["a", "b"]
    moved = several.with_absolute_files().model_paths
    assert moved == {name: str(folder) for name, folder in zip("ab", folders, strict=True)}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "scorer")
    with pytest.raises(ModelError, match="no tokenizer"):
        load_reward_models(reward_config(folder))
