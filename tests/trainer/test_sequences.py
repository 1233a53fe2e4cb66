"""Responses of several sequences, on the way from the sampler to the update."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.agents.trajectory import TokenSequence, Trajectory, Turn
from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.algorithms.load import Part
from hybridrl.batch import LogprobBatch, RolloutBatch, TrainBatch
from hybridrl.rewards.scorer import Scores
from hybridrl.single_controller.payload import concat_rows, take_rows
from hybridrl.trainer.advantages import Advantages, Targets
from hybridrl.trainer.batches import ScoredRollouts
from hybridrl.trainer.collect import Collected
from hybridrl.trainer.train_batch import TrainBatches, build_critic_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.drawn import cases
from tests.workers.rollout.engines import make_prompts

GROUP = 4
DP_SIZE = NUM_MINIBATCHES = 2
PROMPTS = make_prompts((1, 3))

Turns = list[tuple[bool, int]]  # whether it was sampled, and its tokens
Drawn = list[tuple[int, Turns]]  # tokens of the context of each sequence, and its turns

turns = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=3)
sequences = st.lists(st.tuples(st.integers(1, 4), turns), min_size=1, max_size=3)
trajectories = st.lists(sequences, min_size=2 * GROUP, max_size=2 * GROUP)


def _trajectory(number: int, drawn: Drawn) -> Trajectory:
    """Build a trajectory in which the number of each token is its own."""
    count = iter(range(100 * number, 100 * (number + 1)))

    def tokens(size: int) -> Tensor:
        return torch.tensor([next(count) for _ in range(size)])

    def sequence(size: int, turns: Turns) -> TokenSequence:
        context = tokens(size)
        given = [(tokens(n), is_sampled) for is_sampled, n in [(True, 1), *turns, (True, 2)]]
        return TokenSequence(
            context, tuple(Turn(ids, _logprobs(ids) if known else None) for ids, known in given)
        )

    return Trajectory(
        sequences=tuple(sequence(*each) for each in drawn),
        ended="answer",
        failure="",
        weight_version=0,
        num_tool_calls=0,
        num_tool_errors=0,
        tool_seconds=0.0,
    )


def _logprobs(token_ids: Tensor) -> Tensor:
    return -token_ids / 1000 - 1


def _sequences_of(batch: RolloutBatch | TrainBatch, row: int) -> list[list[int]]:
    assert batch.sequence_lengths_BQ is not None
    lengths = batch.sequence_lengths_BQ.unbind()[row].tolist()
    return [part.tolist() for part in batch.token_ids_BL.unbind()[row].split(lengths)]


@cases(by_day=15, by_night=60)
@given(
    drawn=trajectories,
    rewards=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
)
def test_each_sampled_token_gets_the_advantage_of_its_response(
    drawn: list[Drawn], rewards: list[float]
) -> None:
    given_B = [_trajectory(number, each) for number, each in enumerate(drawn)]
    samples = [trajectory.to_sample() for trajectory in given_B]
    rollouts = concat_rows(  # as from two ranks
        [
            assemble_rollouts(PROMPTS[:1], samples[:GROUP], policy_version=0),
            assemble_rollouts(PROMPTS[1:], samples[GROUP:], policy_version=0),
        ]
    )
    rewards_B = torch.tensor(rewards)
    scores = Scores(("r",), torch.ones(1), rewards_B[:, None], torch.zeros(8, 1, dtype=torch.bool))
    no_task: Any = None
    collected = Collected.of(ScoredRollouts(no_task, rollouts, scores))
    no_logprobs = LogprobBatch(batch_size=[8])

    advantages = Advantages(part=Part.of(grpo), max_response_tokens=9)
    targets = advantages(collected, no_logprobs, kl=0.0)
    batch = TrainBatches(
        dp_size=DP_SIZE,
        num_minibatches=NUM_MINIBATCHES,
        mask_truncated=False,
        correction=None,
        counts_groups=True,
    )(collected, no_logprobs, targets.advantages_BL)

    expected_B = grpo(rewards_B, rollouts.prompt_index_B).tolist()
    trained: list[int] = []
    for rank in range(DP_SIZE):
        for minibatch in take_rows(batch, rank * 4, rank * 4 + 4).chunk(NUM_MINIBATCHES):
            for row in range(len(minibatch)):
                tokens = minibatch.token_ids_BL.unbind()[row]
                number = int(tokens[0]) // 100
                mask = minibatch.response_mask_BL.unbind()[row]
                advantages = minibatch.advantages_BL.unbind()[row]
                assert advantages.tolist() == [expected_B[number] * bool(m) for m in mask]
                logprobs = minibatch.sampler_logprobs_BL.unbind()[row]
                assert torch.equal(logprobs, torch.where(mask, _logprobs(tokens), 0.0))
                assert _sequences_of(minibatch, row) == [
                    [*s.context.tolist(), *(int(t) for turn in s.turns for t in turn.token_ids)]
                    for s in given_B[number].sequences
                ]
                trained += tokens[mask].tolist()
    sampled = [
        int(token)
        for trajectory in given_B
        for turn in trajectory.turns
        if turn.logprobs is not None
        for token in turn.token_ids
    ]
    assert sorted(trained) == sorted(sampled)


def test_a_critic_learns_from_the_same_sequences() -> None:
    sample = _trajectory(1, [(2, []), (3, [(False, 2)])]).to_sample()
    rollouts = assemble_rollouts(PROMPTS[:1], [sample], policy_version=0)
    zeros_BL = torch.zeros_like(rollouts.sampler_logprobs_BL)

    batch = build_critic_batch(rollouts, zeros_BL, Targets(zeros_BL, zeros_BL, {}))

    assert batch.sequence_lengths_BQ is not None
    assert batch.sequence_lengths_BQ.values().tolist() == [5, 8]
