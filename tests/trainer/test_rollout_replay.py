from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hybridrl.batch import PromptBatch, RolloutBatch, jagged, row_lengths
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.errors import ReplayError
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.rollout_files import RolloutFiles
from hybridrl.trainer.rollouts import DumpedRollouts, Origin, ReplayedRollouts, head_and_tail
from tests.trainer.rollouts import ScoredAfterwards, rollouts_of, row_of, scores_of

SAMPLING = SamplingParams(num_responses_per_prompt=2, max_response_tokens=4, temperature=1.0)
ORIGIN = Origin({"tokenizer": "t", "agent.loop": "single_turn"}, {"reward.function": "exact_match"})


class _Engines:
    """Gives each row tokens of its own."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        num_responses = sampling.num_responses_per_prompt
        rows = [row for row in prompts.token_ids_PL.unbind() for _ in range(num_responses)]
        tokens = [torch.cat([row, torch.arange(n % 3 + 1)]) for n, row in enumerate(rows)]
        return rollouts_of(
            tokens,
            [torch.arange(len(row)) > 1 for row in tokens],
            prompts.prompt_index_P.repeat_interleave(num_responses),
            sampler_logprobs_BL=jagged([torch.rand(len(row)) for row in tokens]),
            policy_version_B=torch.arange(len(tokens)),
            is_truncated_B=torch.arange(len(tokens)) % 2 == 0,
            routed_experts_BLJK=jagged(
                [torch.randint(8, (len(row), 2, 3), dtype=torch.int16) for row in tokens]
            ),
            sequence_lengths_BQ=jagged([torch.tensor([1, len(row) - 1]) for row in tokens]),
        )


@dataclass
class _Reward(ScoredAfterwards):
    """Scores a row by its number, and counts its calls."""

    num_calls: int = 0

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        self.num_calls += 1
        return scores_of(torch.arange(len(rollouts)).float() / 3)


def _task(first_index: int = 0, *, answer: str = "a", token: int = 7, seed: int = 3) -> PromptStep:
    rows = [row_of(n, answer=answer, tokens=[token, n]) for n in range(5)]
    return build_prompt_step(rows, range(first_index, first_index + len(rows)), seed=seed)


@pytest.fixture
def files(tmp_path: Path) -> RolloutFiles:
    return RolloutFiles(tmp_path / "rollouts")


@pytest.fixture
def sampled(files: RolloutFiles) -> tuple[RolloutBatch, Scores]:
    """One call of step 2, written."""
    dump = DumpedRollouts(_Engines(), _Reward(), files, ORIGIN)
    dump.begin(2, "train")
    rollouts = dump.generate(_task().prompts, SAMPLING)
    return rollouts, dump(rollouts, _task())


def _replay(files: RolloutFiles, *, origin: Origin = ORIGIN) -> ReplayedRollouts:
    replay = ReplayedRollouts(_Reward(), files, origin)
    replay.begin(2, "train")
    return replay


@pytest.mark.shows("4.19")
def test_every_column_is_read_as_it_was_written(
    files: RolloutFiles, sampled: tuple[RolloutBatch, Scores]
) -> None:
    replay = _replay(files)
    rollouts = replay.generate(_task().prompts, SAMPLING)
    names = [name for name, column in sampled[0].items() if column is not None]
    assert {"routed_experts_BLJK", "sequence_lengths_BQ"}.issubset(names)
    for name in names:
        assert _is_equal(rollouts.get(name), sampled[0].get(name)), name
    scores = replay(rollouts, _task())
    assert torch.equal(scores.rewards_B, sampled[1].rewards_B)
    # Columns that shared their rows share them again.
    assert len((rollouts.sampler_logprobs_BL * rollouts.response_mask_BL).values())


@pytest.mark.shows("4.19")
def test_a_smaller_step_has_the_head_and_the_tail_of_the_recorded_one(
    files: RolloutFiles, sampled: tuple[RolloutBatch, Scores]
) -> None:
    task = head_and_tail(_task(), 3)
    assert [row.prompt_text for row in task.rows] == ["p0", "p1", "p4"]
    replay = _replay(files)
    rollouts = replay.generate(task.prompts, SAMPLING)
    assert rollouts.policy_version_B.tolist() == [0, 1, 2, 3, 8, 9]
    assert (
        replay(rollouts, task).rewards_B.tolist()
        == sampled[1].rewards_B[[0, 1, 2, 3, 8, 9]].tolist()
    )


@pytest.mark.shows("4.19")
@pytest.mark.parametrize(
    ("task", "sampling", "origin", "names"),
    [
        (_task(first_index=5), SAMPLING, ORIGIN, "has no prompt 5"),
        (_task(token=8), SAMPLING, ORIGIN, "other tokens of prompt 0.*solve_rate its rewards"),
        (_task(seed=4), SAMPLING, ORIGIN, "set seed"),
        (_task(), replace(SAMPLING, temperature=0.5), ORIGIN, "temperature: 1.0 there, 0.5 here"),
        (_task(), SAMPLING, replace(ORIGIN, rollouts={"tokenizer": "u"}), "tokenizer: 't' there"),
    ],
)
@pytest.mark.usefixtures("sampled")
def test_rollouts_of_another_run_are_refused(
    files: RolloutFiles, task: PromptStep, sampling: SamplingParams, origin: Origin, names: str
) -> None:
    with pytest.raises(ReplayError, match="step-000000002-train-0.*" + names):
        _replay(files, origin=origin).generate(task.prompts, sampling)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def _change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.shows("4.19")
@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("step-000000002-train-0.safetensors", _cut, "was written with"),
        ("step-000000002-train-0.safetensors", _change, "its checksum is"),
        ("step-000000002-train-0.safetensors", Path.unlink, "has 0 bytes"),
        ("step-000000002-train-0.json", _cut, "cannot be read"),
        ("step-000000002-train-0.json", Path.unlink, "samples more often in a step"),
    ],
)
@pytest.mark.usefixtures("sampled")
def test_a_file_that_is_not_as_it_was_written_is_refused(
    files: RolloutFiles, name: str, damage: Callable[[Path], None], told: str
) -> None:
    damage(files.folder / name)
    with pytest.raises(ReplayError, match=told):
        _replay(files).generate(_task().prompts, SAMPLING)


@pytest.mark.usefixtures("sampled")
def test_another_reward_or_answer_scores_again(files: RolloutFiles) -> None:
    for origin, task in (
        (replace(ORIGIN, scores={"reward.function": "numeric"}), _task()),
        (ORIGIN, _task(answer="b")),
    ):
        replay = _replay(files, origin=origin)
        rollouts = replay.generate(task.prompts, SAMPLING)
        replay(rollouts, task)
        assert isinstance(replay.reward, _Reward)
        assert replay.reward.num_calls == 1


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.is_nested:
        return torch.equal(first, second)
    return torch.equal(first.values(), second.values()) and torch.equal(
        row_lengths(first), row_lengths(second)
    )
