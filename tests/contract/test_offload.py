from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridrl.config.model import LoraConfig
from hybridrl.errors import PhaseError
from hybridrl.workers.train.protocol import TrainState
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import NO_ADAPTER, Rank, RanksUnderTest, take_step
from tests.tiny_models import DENSE
from tests.workers.train.engines import assert_same_weights, make_rows, to_rollouts, weights_of
from tests.workers.train.lora_engines import LORA

pytestmark = on_layouts()


def _rest_and_train(rank: Rank, folder: Path, lora: LoraConfig) -> None:
    resting, steady = (rank.policy(folder, lora=lora) for _ in range(2))
    rollouts = to_rollouts(make_rows(3))
    for seed in range(3):
        for engine in (resting, steady):
            take_step(engine, make_rows(5, seed=seed))
            engine.compute_logprobs(rollouts, temperature=1.0)
        resident = {part: resting.resident_bytes(part) for part in TrainState}
        # No more than its share: nothing that was gathered is left behind.
        specs = [spec for each in resting.weight_sets for spec in resting.weight_specs(each)]
        whole = sum(spec.num_bytes for spec in specs)
        assert resident[TrainState.PARAMETERS] <= rank.layout.max_share * whole
        if rank.layout.max_share:  # else nothing ever stays on the device
            assert min(resident[TrainState.PARAMETERS], resident[TrainState.OPTIMIZER]) > 0
        for _ in range(2):
            for part in TrainState:
                resting.offload(part)
                resting.offload(part)
                assert resting.resident_bytes(part) == 0
            for part in TrainState:
                resting.restore(part)
                resting.restore(part)
        assert resident == {part: resting.resident_bytes(part) for part in TrainState}
        one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (resting, steady))
        assert torch.equal(one.logprobs_BL.values(), other.logprobs_BL.values())
        for each in resting.weight_sets:
            assert_same_weights(dict(resting.full_weights(each)), dict(steady.full_weights(each)))


@pytest.mark.parametrize("lora", [NO_ADAPTER, LORA], ids=["whole", "adapter"])
def test_training_with_offloads_in_between_is_bitwise_the_same(
    ranks: RanksUnderTest, folder: Path, lora: LoraConfig
) -> None:
    if lora.enabled and not (ranks.engine.has_adapters and ranks.layout.family in DENSE):
        pytest.skip("no adapters")
    ranks.run(_rest_and_train, folder, lora)


def _leave_one_by_one(rank: Rank, folder: Path) -> None:
    engine, batch = rank.policy(folder), make_rows(4)
    take_step(engine, batch)
    for part in TrainState:
        others = {p: engine.resident_bytes(p) for p in TrainState if p is not part}
        engine.offload(part)
        assert others == {p: engine.resident_bytes(p) for p in others}
        with pytest.raises(PhaseError, match=rf"update\(\) needs {part.value}"):
            take_step(engine, batch)
        engine.restore(part)
        take_step(engine, batch)
    before = weights_of(engine)
    engine.offload(TrainState.OPTIMIZER)
    engine.offload(TrainState.GRADIENTS)
    engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    assert_same_weights(weights_of(engine), before)  # what a weight sync meets
    engine.offload(TrainState.PARAMETERS)
    with pytest.raises(PhaseError, match=r"compute_logprobs\(\) needs parameters"):
        engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    with pytest.raises(PhaseError, match=r"full_weights\(\) needs parameters"):
        next(iter(engine.full_weights()))


def test_each_part_is_offloaded_alone_and_its_use_is_refused(
    ranks: RanksUnderTest, folder: Path
) -> None:
    ranks.run(_leave_one_by_one, folder)
