from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.batch import (
    LogprobBatch,
    PromptBatch,
    RolloutBatch,
    TrainBatch,
    leave_experts,
    routed_experts_of,
    row_lengths,
    row_offsets,
)
from hybridrl.errors import EngineError
from hybridrl.metrics import check_declared, merge
from hybridrl.sampler import Sample
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.single_controller.payload import concat_rows, take_rows
from hybridrl.trainer.rollout_files import RolloutFiles
from hybridrl.trainer.train_batch import balance, build_train_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts, describe_staleness
from tests.trainer.test_rollout_replay import SAMPLING
from tests.workers.rollout.engines import make_prompts

PROMPTS = make_prompts((1, 3))
RESPONSES = (2, 0, 1, 4)  # tokens; two for each prompt
LENGTHS = [3, 1, 4, 7]


def _respond(number: int, num_tokens: int, *, num_routed: int) -> Sample:
    experts = torch.arange(num_routed * 2 * 3, dtype=torch.int16).view(num_routed, 2, 3)
    return Sample(
        token_ids=torch.arange(num_tokens),
        logprobs=-torch.ones(num_tokens),
        finish_reason="stop",
        weight_version=0,
        routed_experts_LJK=experts + 100 * number,
    )


def _routed() -> list[Sample]:
    return [
        _respond(number, n, num_routed=length - 1)
        for number, (n, length) in enumerate(zip(RESPONSES, LENGTHS, strict=True))
    ]


def _experts(batch: RolloutBatch) -> Tensor:
    assert batch.routed_experts_BLJK is not None
    return batch.routed_experts_BLJK.values()


def test_the_last_token_of_a_row_went_through_no_expert() -> None:
    batch = assemble_rollouts(PROMPTS, _routed(), policy_version=0)
    assert row_lengths(batch.token_ids_BL).tolist() == LENGTHS
    assert _experts(batch).shape == (sum(LENGTHS), 2, 3)
    assert _experts(batch).dtype == torch.int16
    assert batch.routed_experts_BLJK is not None
    rows = batch.routed_experts_BLJK.unbind()
    for row, response in zip(rows, _routed(), strict=True):
        assert response.routed_experts_LJK is not None
        assert torch.equal(row[:-1], response.routed_experts_LJK)
        assert row[-1].unique().tolist() == [-1]


def test_experts_stay_with_their_rows_on_the_way_to_the_update() -> None:
    whole = assemble_rollouts(PROMPTS, _routed(), policy_version=0)
    joined = concat_rows([take_rows(whole, 0, 1), take_rows(whole, 1, 4)])
    assert torch.equal(_experts(joined), _experts(whole))
    order = [3, 1, 0, 2]
    batch = build_train_batch(joined, LogprobBatch(batch_size=[4]), joined.sampler_logprobs_BL)
    ordered = batch[order]
    assert ordered.routed_experts_BLJK is not None
    for place, row in enumerate(order):
        begin, end = row_offsets(whole.token_ids_BL)[row : row + 2].tolist()
        assert torch.equal(ordered.routed_experts_BLJK.unbind()[place], _experts(whole)[begin:end])
    assert torch.equal(row_offsets(ordered.routed_experts_BLJK), row_offsets(ordered.token_ids_BL))


def test_without_experts_or_stale_tokens_no_column_of_them_travels() -> None:
    responses = [replace(response, routed_experts_LJK=None) for response in _routed()]
    batch = assemble_rollouts(PROMPTS, responses, policy_version=6)
    assert concat_rows([batch[:2], batch[2:]]).routed_experts_BLJK is None
    assert batch.weight_versions_BL is None
    assert batch.policy_version_B.tolist() == [6] * 4


@pytest.mark.parametrize(("row", "num_routed"), [*((row, 0) for row in range(4)), (2, 4)])
def test_a_response_without_its_experts_is_named(row: int, num_routed: int) -> None:
    responses, num_tokens = _routed(), RESPONSES[row]
    routed = _respond(row, num_tokens, num_routed=num_routed)
    responses[row] = routed if num_routed else replace(routed, routed_experts_LJK=None)
    words = f"of {num_routed} tokens of response {row}, which has {LENGTHS[row]} with its"
    with pytest.raises(EngineError, match=words):
        assemble_rollouts(PROMPTS, responses, policy_version=0)


def test_each_token_has_its_version_on_the_way_to_the_update() -> None:
    responses = [replace(each, routed_experts_LJK=None, weight_version=5) for each in _routed()]
    responses[0] = replace(responses[0], weight_versions=torch.tensor([5, 6]))
    is_sampled = torch.tensor([True, False, True, True])
    responses[3] = replace(responses[3], is_sampled=is_sampled)
    rollouts = assemble_rollouts(PROMPTS, responses, policy_version=6, has_versions=True)
    assert rollouts.policy_version_B.tolist() == [5] * 4
    joined = concat_rows([take_rows(rollouts, 3, 4), take_rows(rollouts, 0, 2)])
    batch = build_train_batch(joined, LogprobBatch(batch_size=[3]), joined.sampler_logprobs_BL)
    versions_BL = batch.weight_versions_BL
    assert versions_BL is not None
    assert versions_BL.dtype == torch.int32
    rows = [row.tolist() for row in versions_BL.unbind()]
    assert rows == [[-1, -1, -1, 5, -1, 5, 5], [-1, 5, 6], [-1]]


AGES = st.lists(st.integers(0, 12), min_size=1, max_size=30)


def test_each_age_has_its_place_in_the_histogram() -> None:
    metrics = describe_staleness(torch.tensor([0.5, 1, 1, 2, 3.5, 4, 7, 7, 8, 900]).double())
    shares = {
        name.rpartition("/")[2]: metric.value
        for name, metric in metrics.items()
        if "fraction" in name
    }
    assert shares == {"0": 0.1, "1": 0.2, "2": 0.1, "3": 0.1, "4_to_7": 0.3, "8_or_more": 0.2}
    assert metrics["rollout/staleness_steps/mean"].value == pytest.approx(93.4)
    assert metrics["rollout/staleness_steps/max"].value == 900
    check_declared(metrics)


@given(AGES, AGES)
def test_ranks_together_have_the_histogram_of_all_tokens(
    first: list[int], second: list[int]
) -> None:
    parts = [describe_staleness(torch.tensor(ages).double()) for ages in (first, second)]
    merged, joint = merge(parts), describe_staleness(torch.tensor(first + second).double())
    assert {name: one.value for name, one in merged.items()} == {
        name: one.value for name, one in joint.items()
    }
    shares = [one.value for name, one in merged.items() if "fraction" in name]
    assert abs(sum(shares) - 1) < 1e-12


MANY = (40, 5, 80, 20, 60, 10)  # tokens of each response, one to each prompt


def routes_of(prompt_index: int, length: int) -> torch.Tensor:
    numbers = torch.arange(length * 48 * 8) * 7 + prompt_index
    return (numbers % 128).to(torch.int16).view(length, 48, 8)


class ExpertWorker(Worker):
    @register(Dispatch.DP_COMPUTE)
    def generate(self, prompts: PromptBatch) -> RolloutBatch:
        samples = []
        for index in prompts.prompt_index_P.tolist():
            length = MANY[index]
            samples.append(
                Sample(
                    token_ids=torch.full((length,), index),
                    logprobs=torch.zeros(length),
                    finish_reason="stop",
                    weight_version=0,
                    routed_experts_LJK=routes_of(index, length),
                )
            )
        return leave_experts(assemble_rollouts(prompts, samples, policy_version=0))

    @register(Dispatch.DP_COMPUTE)
    def update(self, batch: TrainBatch) -> list[int]:
        """Return the numbers of the prompts whose experts arrived as they were sampled."""
        experts_BLJK = routed_experts_of(batch)
        assert experts_BLJK is not None
        arrived = []
        for tokens_L, experts_LJK in zip(
            batch.token_ids_BL.unbind(), experts_BLJK.unbind(), strict=True
        ):
            index = int(tokens_L[-1])
            assert len(tokens_L) == len(experts_LJK)
            assert torch.equal(experts_LJK[:-1], routes_of(index, MANY[index]))
            arrived.append(index)
        return arrived


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(ExpertWorker)) as group:
        yield group


def test_experts_pass_from_rank_to_rank_beside_the_driver(
    group: RayWorkerGroup, tmp_path: Path
) -> None:
    prompts = make_prompts((1,) * len(MANY))
    for _ in range(2):
        rollouts: RolloutBatch = group.generate(prompts)
        assert rollouts.routed_experts_BLJK is None
        logprobs = LogprobBatch(batch_size=[len(rollouts)])
        batch = build_train_batch(rollouts, logprobs, rollouts.sampler_logprobs_BL)
        batch = balance(batch, dp_size=2, num_minibatches=1)
        arrived = group.update(batch)
        assert arrived != sorted(arrived), "no row went to another rank: the test shows nothing"
        assert sorted(arrived) == list(range(len(MANY)))

    files = RolloutFiles(tmp_path)
    files.write("step", prompts, rollouts, sampling=SAMPLING, origin={})
    facts = files.facts("step")
    assert facts is not None
    _, read = files.read("step", facts)
    assert read.routed_experts_BLJK is not None
    for index, experts_LJK in enumerate(read.routed_experts_BLJK.unbind()):
        assert torch.equal(experts_LJK[:-1], routes_of(index, MANY[index]))
