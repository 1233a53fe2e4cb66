from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hybridrl.batch import RolloutBatch, jagged, row_offsets
from hybridrl.errors import RemoteCallError
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)

_ROWS = 4096  # above 100 KB, below which Ray copies


class TensorWorker(Worker):
    @register(Dispatch.DP_COMPUTE)
    def echo(self, batch: Any) -> Any:
        return batch

    @register(Dispatch.DP_COMPUTE)
    def storage_bytes(self, rows: torch.Tensor) -> list[int]:
        return [rows.untyped_storage().nbytes()]

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, rows: torch.Tensor) -> None:
        self.kept = rows

    @register(Dispatch.RANK_ZERO)
    def write_into_kept(self, *, is_hidden: bool) -> None:
        (self.kept.data if is_hidden else self.kept).add_(1.0)

    @register(Dispatch.ONE_TO_ALL)
    def first_kept(self) -> float:
        return self.kept[0].item()

    @register(Dispatch.DP_COMPUTE)
    def add_in_place(self, batch: TensorDict) -> TensorDict:
        batch["x"].add_(1.0)
        return batch

    @register(Dispatch.DP_COMPUTE)
    def add_in_place_without_autograd(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            rows[0] = 5.0
        return rows

    @register(Dispatch.DP_COMPUTE)
    def clone_and_add_in_place(self, batch: TensorDict) -> TensorDict:
        own = batch.clone()
        own["x"].add_(1.0)
        return own


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(TensorWorker)) as group:
        yield group


def test_a_slice_carries_its_own_bytes_and_no_others(group: RayWorkerGroup) -> None:
    rows = torch.arange(2.0 * _ROWS).reshape(_ROWS, 2)
    for width in (2, 1):  # the second is strided: a column
        half = _ROWS // 2 * width * rows.itemsize
        assert group.storage_bytes(rows[:, :width]) == [half, half]


def test_readers_share_one_copy_so_a_hidden_write_reaches_all(group: RayWorkerGroup) -> None:
    # Not wanted, and the reason for the contract: it is shown here so that it changes in sight.
    group.keep(torch.zeros(_ROWS * 16))
    group.write_into_kept(is_hidden=True)
    assert group.first_kept() == [1.0, 1.0]


def test_a_write_into_a_batch_of_an_earlier_call_is_an_error(group: RayWorkerGroup) -> None:
    group.keep(torch.zeros(_ROWS * 16))
    with pytest.raises(RemoteCallError, match=r"rank 0 .* ReadOnlyError"):
        group.write_into_kept(is_hidden=False)
    group.keep(torch.zeros(1))


@pytest.mark.parametrize("num_rows", [2, _ROWS * 16])
def test_an_in_place_write_into_a_received_batch_is_an_error(
    group: RayWorkerGroup, num_rows: int
) -> None:
    batch = TensorDict({"x": torch.zeros(num_rows), "y": torch.zeros(num_rows)}, [num_rows])
    for _ in range(2):
        with pytest.raises(RemoteCallError, match=r"ReadOnlyError: .*float32 .*: clone\(\)"):
            group.add_in_place(batch)
    with pytest.raises(RemoteCallError, match="ReadOnlyError"):
        group.add_in_place_without_autograd(batch["x"])
    assert group.clone_and_add_in_place(batch)["x"].sum() == num_rows


def test_a_numpy_batch_refuses_writes_by_itself(group: RayWorkerGroup) -> None:
    with pytest.raises(RemoteCallError, match="read-only"):
        group.add_in_place_without_autograd(np.zeros(2))


def test_a_jagged_batch_comes_back_as_it_went(group: RayWorkerGroup) -> None:
    token_ids_BL = jagged([torch.arange(length) for length in (3, 1, 4, 2)])
    batch = RolloutBatch(
        token_ids_BL=token_ids_BL,
        response_mask_BL=token_ids_BL > 1,
        sampler_logprobs_BL=token_ids_BL * -0.5,
        prompt_index_B=torch.arange(4),
        policy_version_B=torch.zeros(4, dtype=torch.int64),
        is_truncated_B=torch.tensor([True, False, True, False]),
        batch_size=[4],
    )
    for _ in range(2):
        back = group.echo(batch)
        assert isinstance(back, RolloutBatch)
        torch.testing.assert_close(back.token_ids_BL.values(), token_ids_BL.values())
        torch.testing.assert_close(row_offsets(back.token_ids_BL), row_offsets(token_ids_BL))
        assert back.is_truncated_B.tolist() == [True, False, True, False]
        # Fields of one batch can still meet in one operation.
        masked_BL = back.sampler_logprobs_BL * back.response_mask_BL
        torch.testing.assert_close(
            masked_BL.values(), (batch.sampler_logprobs_BL * batch.response_mask_BL).values()
        )
