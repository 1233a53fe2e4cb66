"""The experts of tokens pass from rank to rank, and not through the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridrl.batch import (
    LogprobBatch,
    PromptBatch,
    RolloutBatch,
    TrainBatch,
    leave_experts,
    routed_experts_of,
)
from hybridrl.sampler import Sample
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.trainer.rollout_files import RolloutFiles
from hybridrl.trainer.train_batch import balance, build_train_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.trainer.test_rollout_replay import SAMPLING
from tests.workers.rollout.engines import make_prompts

LENGTHS = (40, 5, 80, 20, 60, 10)  # tokens of each response, one to each prompt


def _experts(prompt_index: int, length: int) -> torch.Tensor:
    numbers = torch.arange(length * 48 * 8) * 7 + prompt_index
    return (numbers % 128).to(torch.int16).view(length, 48, 8)


class ExpertWorker(Worker):
    @register(Dispatch.DP_COMPUTE)
    def generate(self, prompts: PromptBatch) -> RolloutBatch:
        samples = []
        for index in prompts.prompt_index_P.tolist():
            length = LENGTHS[index]
            samples.append(
                Sample(
                    token_ids=torch.full((length,), index),
                    logprobs=torch.zeros(length),
                    finish_reason="stop",
                    weight_version=0,
                    routed_experts_LJK=_experts(index, length),
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
            assert torch.equal(experts_LJK[:-1], _experts(index, LENGTHS[index]))
            arrived.append(index)
        return arrived


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(ExpertWorker)) as group:
        yield group


def test_experts_pass_from_rank_to_rank_beside_the_driver(
    group: RayWorkerGroup, tmp_path: Path
) -> None:
    prompts = make_prompts((1,) * len(LENGTHS))
    for _ in range(2):
        rollouts: RolloutBatch = group.generate(prompts)
        assert rollouts.routed_experts_BLJK is None
        logprobs = LogprobBatch(batch_size=[len(rollouts)])
        batch = build_train_batch(rollouts, logprobs, rollouts.sampler_logprobs_BL)
        batch = balance(batch, dp_size=2, num_minibatches=1)
        arrived = group.update(batch)
        assert arrived != sorted(arrived), "no row went to another rank: the test shows nothing"
        assert sorted(arrived) == list(range(len(LENGTHS)))

    files = RolloutFiles(tmp_path)
    files.write("step", prompts, rollouts, sampling=SAMPLING, origin={})
    facts = files.facts("step")
    assert facts is not None
    _, read = files.read("step", facts)
    assert read.routed_experts_BLJK is not None
    for index, experts_LJK in enumerate(read.routed_experts_BLJK.unbind()):
        assert torch.equal(experts_LJK[:-1], _experts(index, LENGTHS[index]))
