from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.agents.trajectory import TokenSequence, Trajectory, Turn
from hybridrl.algorithms.advantages.gae import gae
from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.algorithms.kl import k1
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.rollout_correction import importance
from hybridrl.batch import LogprobBatch, RolloutBatch, TrainBatch, jagged, objects
from hybridrl.data.source import build_prompt_step
from hybridrl.errors import TrainingError
from hybridrl.images import Image
from hybridrl.rewards.scorer import Scores
from hybridrl.single_controller.payload import concat_rows, take_rows
from hybridrl.trainer.advantages import Advantages, Targets, describe_values
from hybridrl.trainer.batches import ScoredRollouts
from hybridrl.trainer.build_algorithm import with_time_limit
from hybridrl.trainer.collect import Collected
from hybridrl.trainer.train_batch import TrainBatches, balance, build_critic_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.drawn import cases
from tests.trainer.rollouts import rollouts_of, row_of, scores_of
from tests.workers.rollout.engines import make_prompts

MASK_BL = jagged([torch.tensor([False, *[True] * n]) for n in (2, 1, 3, 1)])
OLD_BL = jagged([torch.tensor(row) for row in ([0.0, 0, 1], [0.0, 0], [0.0, 9, 0, 0], [0.0, 0])])
NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
LOGPROBS = LogprobBatch(old_logprobs_BL=OLD_BL, batch_size=[4])


def batch_of(
    *, is_kept: list[bool] | None = None, logprobs: LogprobBatch = LOGPROBS, **settings: Any
) -> TrainBatch:
    """Two prompts with two responses each, of 2, 1, 3 and 1 tokens; the third is truncated."""
    rollouts = rollouts_of(
        [torch.arange(len(row)) for row in MASK_BL.unbind()],
        MASK_BL.unbind(),
        [5, 5, 8, 8],
        is_truncated_B=torch.tensor([False, False, True, False]),
    )
    nothing: Any = None
    scored = ScoredRollouts(nothing, rollouts, scores_of([0.0, 1.0, 1.0, 0.5]))
    kept_B = torch.tensor([True] * 4 if is_kept is None else is_kept)
    plain: dict[str, Any] = {"mask_truncated": False, "correction": None, "counts_groups": False}
    batches = TrainBatches(num_minibatches=1, **({"dp_size": 1} | plain | settings))
    collected = Collected(everything=scored, batch=scored, is_kept_B=kept_B)
    return batches(collected, logprobs, torch.ones_like(OLD_BL))


def rows(column_BL: Tensor | None) -> list[list[float]]:
    assert column_BL is not None
    return [row.tolist() for row in column_BL.unbind()]


def test_rows_left_out_keep_tokens_and_have_an_empty_mask() -> None:
    batch = batch_of(is_kept=[True, True, False, False])
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [2, 1, 0, 0]
    assert [len(row) for row in rows(batch.token_ids_BL)] == [3, 2, 4, 2]
    truncated = batch_of(mask_truncated=True)
    assert [sum(row) for row in rows(truncated.response_mask_BL)] == [2, 1, 0, 1]
    shared = batch_of(is_kept=[True, True, False, False], dp_size=2)
    assert [sum(row) for row in rows(shared.response_mask_BL)] == [2, 0, 1, 0]  # one a rank


def keep_good(rewards_B: Tensor, is_truncated_B: Tensor) -> Tensor:
    return (rewards_B > 0) & ~is_truncated_B


def keep_first_token(response_mask_BL: Tensor) -> Tensor:
    return jagged([torch.arange(len(row)) < 2 for row in response_mask_BL.unbind()])


@pytest.mark.shows("4.17")
def test_a_filter_takes_rows_or_tokens_out_of_the_loss() -> None:
    batch = batch_of(row_filter=Part.of(keep_good))
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [0, 1, 0, 1]
    assert [len(row) for row in rows(batch.token_ids_BL)] == [3, 2, 4, 2]
    batch = batch_of(row_filter=Part.of(keep_first_token), is_kept=[True, True, True, False])
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [1, 1, 1, 0]


@pytest.mark.shows("4.17")
@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned a NoneType"),
        (torch.ones(4), r"returned float32 \[4\]"),
        (torch.ones(3, dtype=torch.bool), r"returned bool \[3\], and a row filter .*bool \[4\]"),
        (jagged([torch.ones(2, dtype=torch.bool)] * 4), "8 tokens in 4 rows"),
    ],
)
def test_a_filter_that_returns_something_else_is_named(returned: object, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        batch_of(row_filter=Part("algorithm.row_filter", "f.py:f", (), lambda: returned))


@pytest.mark.shows("4.17")
def test_a_function_of_the_user_that_hangs_ends_the_step_by_name() -> None:
    def hang() -> None:
        while True:
            pass

    former = signal.getsignal(signal.SIGALRM)
    part = Part("algorithm.row_filter", "f.py:hang", (), hang)
    with pytest.raises(TrainingError, match=r"row_filter=f\.py:hang took longer than cluster"):
        batch_of(row_filter=with_time_limit(part, timeout_s=0.05))
    assert signal.getsignal(signal.SIGALRM) == former


def test_a_correction_weighs_kept_rows_and_masks_rejected_tokens() -> None:
    rejecting = Part.of(importance, reject="token_k2 <= 1")
    batch = batch_of(is_kept=[True, True, True, False], correction=rejecting)
    assert rows(batch.sampler_weights_BL)[:2] == [[0.0, 1.0, 2.0], [0.0, 1.0]]  # e is truncated
    assert rows(batch.response_mask_BL)[2] == [False, False, True, True]  # 9 nats apart
    assert rows(batch.sampler_weights_BL)[2] == [0.0, 0.0, 1.0, 1.0]
    assert rows(batch.sampler_weights_BL)[3] == [0.0, 0.0]


def test_a_mean_weight_is_taken_over_the_rows_that_are_learned() -> None:
    normalized = Part.of(importance, high=1e6, normalize=True)
    batch = batch_of(is_kept=[True, True, False, False], correction=normalized)
    weights = [weight for row in rows(batch.sampler_weights_BL)[:2] for weight in row if weight]
    assert sum(weights) / 3 == pytest.approx(1.0)


def test_groups_whose_prompts_differ_by_their_images_alone_stay_on_a_rank() -> None:
    tokens_L, mask_L = torch.arange(9), torch.arange(9) >= 7
    batch = TrainBatch(
        token_ids_BL=jagged([tokens_L] * 4),
        response_mask_BL=jagged([mask_L] * 4),
        advantages_BL=jagged([number * mask_L for number in torch.arange(4.0)]),
        sampler_logprobs_BL=jagged([0.0 * mask_L] * 4),
        images_B=objects([(Image(1, 3, n, NO_PIXELS),) for n in (1, 1, 2, 2)]),
        batch_size=[4],
    )
    balanced = balance(batch, dp_size=2, num_minibatches=1)
    assert [row[-1] for row in rows(balanced.advantages_BL)] == [0.0, 1.0, 2.0, 3.0]


def test_groups_count_the_tokens_and_rows_that_are_learned() -> None:
    batch = batch_of(is_kept=[True, True, True, False], counts_groups=True)
    assert batch.group_tokens_B is not None
    assert batch.group_rows_B is not None
    assert batch.group_tokens_B.tolist() == [3, 3, 3, 3]
    assert batch.group_rows_B.tolist() == [2, 2, 1, 0]


def test_corrections_and_charges_without_old_log_probs_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"set algorithm\.old_logprobs=recompute"):
        batch_of(correction=Part.of(importance), logprobs=LogprobBatch(batch_size=[4]))
    with pytest.raises(TrainingError, match=r"set algorithm\.old_logprobs=recompute"):
        targets_of(Part.of(rewards_of_rows), kl=0.5)


TWO_MASK_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, True])])
VALUES_BL = jagged([torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0.0, 1.0])])
NO_LOGPROBS = LogprobBatch(batch_size=[2])
TWO_OLD_BL = jagged([torch.tensor([9.0, 0.0, 1.0]), torch.tensor([9.0, -1.0])])
REFERENCE_BL = jagged([torch.zeros(3), torch.zeros(2)])
TWO_LOGPROBS = LogprobBatch(
    old_logprobs_BL=TWO_OLD_BL, reference_logprobs_BL=REFERENCE_BL, batch_size=[2]
)


def collected(scores: Scores | None = None, agent_rewards_BL: Tensor | None = None) -> Collected:
    rollouts = rollouts_of(
        [torch.arange(3), torch.arange(2)],
        TWO_MASK_BL.unbind(),
        [0, 0],
        sampler_logprobs_BL=VALUES_BL,
        is_truncated_B=torch.tensor([True, False]),
        agent_rewards_BL=agent_rewards_BL,
    )
    no_task: Any = None
    return Collected.of(ScoredRollouts(no_task, rollouts, scores or scores_of([1.0, 0.5])))


def targets_of(
    part: Part,
    logprobs: LogprobBatch = NO_LOGPROBS,
    *,
    kl: float = 0.0,
    values_BL: Tensor | None = None,
    given: Collected | None = None,
    **settings: Any,
) -> Targets:
    estimator = Part.of(k1) if kl else None
    advantages = Advantages(part=part, kl_estimator=estimator, max_response_tokens=2, **settings)
    return advantages(given or collected(), logprobs, kl=kl, values_BL=values_BL)


def rewards_of_rows(rewards_B: Tensor) -> Tensor:
    return rewards_B


def rewards_of_tokens(rewards_BL: Tensor) -> Tensor:
    return rewards_BL


def undefined(rewards_B: Tensor) -> Tensor:
    return (rewards_B - rewards_B) / 0.0


def total(rewards_B: Tensor) -> Tensor:
    return rewards_B.sum()


def valued(values_BL: Tensor) -> Tensor:
    return values_BL


PLAIN_GAE = Part.of(gae, lam=1.0, whiten=False)


def sourced(source_B: Sequence[str]) -> Tensor:
    return torch.tensor([float(ord(name)) for name in source_B])


def summed(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """Advantages from which can be seen which rows a part was given."""
    assert len(group_B) == len(rewards_B)
    return rewards_B.sum().expand(len(rewards_B))


@pytest.mark.parametrize("is_kept", [[True] * 6, [True, False, True, True, True, True]])
def test_the_rows_of_a_source_have_an_advantage_that_sees_them_alone(is_kept: list[bool]) -> None:
    sources, rewards = ("a", "b", "a"), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    rows = [row_of(n, source=source) for n, source in enumerate(sources)]
    lengths = [1, 2, 3, 1, 2, 3]
    masks = [torch.tensor([False] + [True] * length) for length in lengths]
    rollouts = rollouts_of([torch.arange(len(m)) for m in masks], masks, [0, 0, 1, 1, 2, 2])
    task = build_prompt_step(rows, range(3), seed=0)
    scored = ScoredRollouts(task, rollouts, scores_of(rewards))
    given = replace(Collected.of(scored), is_kept_B=torch.tensor(is_kept))
    targets = targets_of(
        Part.of(rewards_of_rows),
        LogprobBatch(batch_size=[6]),
        given=given,
        by_source={"a": Part.of(summed), "nowhere": Part.of(valued)},
    )
    total_of_a = 1.0 + 2.0 * is_kept[1] + 16.0 + 32.0
    expected = [total_of_a, total_of_a * is_kept[1], 4.0, 8.0, total_of_a, total_of_a]
    for row_L, advantage, length in zip(
        targets.advantages_BL.unbind(), expected, lengths, strict=True
    ):
        assert row_L.tolist() == [0.0, *[advantage] * length]
    assert targets.returns_BL is None
    by_name = targets_of(Part.of(sourced), LogprobBatch(batch_size=[6]), given=given)
    assert [float(row_L[-1]) for row_L in by_name.advantages_BL.unbind()] == [
        float(ord(name)) * kept for name, kept in zip("aabbaa", is_kept, strict=True)
    ]


def test_a_reward_comes_at_the_end_and_values_are_subtracted() -> None:
    targets = targets_of(PLAIN_GAE, values_BL=VALUES_BL)
    assert targets.returns_BL is not None
    assert targets.advantages_BL.values().tolist() == [0.0, 0.75, 0.5, 0.0, -0.5]
    assert targets.returns_BL.values().tolist() == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_kl_charge_falls_on_the_token_that_moved() -> None:
    targets = targets_of(Part.of(rewards_of_tokens), TWO_LOGPROBS, kl=0.5)
    # Half of (0, 1) and of -1, off a reward that comes with the last token.
    assert targets.advantages_BL.values().tolist() == [0.0, 0.0, 0.5, 0.0, 1.0]
    assert targets.charged["reward/kl_charge/mean"].value == 0.0
    assert targets.charged["reward/kl_nats/mean"].value == 0.0
    rows = targets_of(Part.of(rewards_of_rows), TWO_LOGPROBS, kl=0.5)
    assert rows.advantages_BL.values().tolist() == [0.0, 0.5, 0.5, 0.0, 1.0]


def test_a_response_near_the_limit_pays_before_it_is_compared() -> None:
    targets = targets_of(Part.of(rewards_of_rows), soft_overlong_tokens=2)
    # Of at most 2 tokens the last 2 cost 1/2 each.
    assert targets.advantages_BL.values().tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert targets.charged["reward/overlong_penalty/mean"].value == 0.75


def test_rewards_of_an_agent_stay_with_their_turns() -> None:
    # 0.25 and 0.5 of the agent, twice, and half of 3 and 5; the second row's agent failed.
    agent_rewards_BL = jagged([torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0.0, 9.0])])
    scores = Scores(
        ("right", "own"),
        torch.tensor([0.5, 2.0]),
        torch.tensor([[3.0, 0.75], [5.0, 0.0]]),
        torch.tensor([[False, False], [False, True]]),
    )
    for part, expected in (
        (rewards_of_tokens, [0.0, 0.5, 1.0 + 1.5 - 1.0, 0.0, 2.5 - 0.5]),
        (rewards_of_rows, [0.0, 2.0, 2.0, 0.0, 2.0]),
    ):
        targets = targets_of(
            Part.of(part),
            given=collected(scores, agent_rewards_BL),
            soft_overlong_tokens=2,
            agent_names=("own",),
        )
        assert targets.advantages_BL.values().tolist() == expected


@pytest.mark.parametrize(
    ("part", "values_BL", "message"),
    [
        (Part.of(total), None, r"total returned \[\]; return one number for each of 2 responses"),
        (Part.of(valued), None, "valued reads values_BL, and there is none"),
        (Part.of(valued), VALUES_BL, "must return an AdvantageEstimate"),
        (replace(Part.of(undefined), spelled="own.py:undefined"), None, "py:undefined .* not fin"),
    ],
)
def test_a_part_that_returns_no_advantages_is_named(
    part: Part, values_BL: Tensor | None, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        targets_of(part, values_BL=values_BL)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        *(((1.0, 2.0, 6.0), 1.0), ((5.0, 5.0, 5.0), 0.0), ((0.0, 1.0, 5.0), 1.0)),
        ((6.0, 5.0, 1.0), -3.0),
    ],
)
def test_explained_variance_of_perfect_constant_and_opposite_values(
    values: tuple[float, float, float], explained: float
) -> None:
    returns_BL = jagged([torch.tensor([99.0, 1.0, 2.0]), torch.tensor([99.0, 6.0])])
    values_BL = jagged([torch.tensor([0.0, *values[:2]]), torch.tensor([0.0, values[2]])])
    metrics = describe_values(returns_BL, values_BL, TWO_MASK_BL)
    assert metrics["critic/explained_variance"].value == pytest.approx(explained)
    assert metrics["critic/return/mean"].value == pytest.approx(3.0)


def test_equal_returns_have_no_variance_to_explain() -> None:
    returns_BL = jagged([torch.ones(3), torch.ones(2)])
    metrics = describe_values(returns_BL, VALUES_BL, TWO_MASK_BL)
    assert set(metrics) == {"critic/value/mean", "critic/return/mean"}


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
@given(drawn=trajectories, rewards=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8))
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
