from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from tensordict import TensorClass, TensorDict

from hybridrl import payload
from hybridrl.batch import TrainBatch, jagged, jagged_from, row_offsets
from hybridrl.errors import ReadOnlyError
from hybridrl.single_controller.payload import concat_rows, is_payload, num_rows, take_rows


class Labelled(TensorClass):
    inner: TrainBatch
    words: list[str]
    note: str
    extra: torch.Tensor | None = None


def _through_ray(value: object) -> Any:
    return pickle.loads(cloudpickle.dumps(value, protocol=5))


def _rows(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.arange(length) + 10 * row for row, length in enumerate(lengths)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.arange(6).reshape(2, 3)[:, 1],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.tensor(3.0).expand(4),
        torch.arange(10_000, dtype=torch.bfloat16).reshape(2, 5000).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_arrive_with_value_shape_and_type(tensor: torch.Tensor) -> None:
    arrived = _through_ray([tensor])[0]
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    torch.testing.assert_close(arrived.to(torch.complex64), tensor.to(torch.complex64))
    assert arrived.untyped_storage().nbytes() == math.prod(tensor.shape) * tensor.itemsize


def test_gradients_do_not_travel_and_sparse_or_mixed_tensors_do_as_with_torch() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not _through_ray(weight * 2).requires_grad
    arrived = _through_ray(torch.eye(2).to_sparse())
    torch.testing.assert_close(arrived.to_dense(), torch.eye(2))
    joined = concat_rows([torch.ones(1), torch.ones(1, dtype=torch.float64)])
    assert joined.dtype == torch.float64


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_jagged_rows_taken_in_order_join_to_the_whole(
    lengths: list[int], data: st.DataObject
) -> None:
    whole = jagged(_rows(lengths))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [take_rows(whole, 0, cut), take_rows(whole, cut, len(lengths))]
    assert [num_rows(part) for part in parts] == [cut, len(lengths) - cut]
    joined = concat_rows([_through_ray(part) for part in parts])
    torch.testing.assert_close(joined.values(), whole.values())
    torch.testing.assert_close(row_offsets(joined), row_offsets(whole))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.data())
def test_collections_join_field_by_field(lengths: list[int], data: st.DataObject) -> None:
    count = len(lengths)
    logprobs_BL = jagged(_rows(lengths)).float()
    whole = Labelled(
        inner=TrainBatch(
            token_ids_BL=jagged(_rows(lengths)),
            response_mask_BL=logprobs_BL > 0,
            advantages_BL=logprobs_BL,
            sampler_logprobs_BL=logprobs_BL * 2,
            batch_size=[count],
        ),
        words=[str(length) for length in lengths],
        note="same for all",
        batch_size=[count],
    )
    cut = data.draw(st.integers(1, count - 1))
    parts = [_through_ray(take_rows(whole, *edge)) for edge in ((0, cut), (cut, count))]
    joined = concat_rows(parts)
    assert type(joined) is Labelled
    assert type(joined.inner) is TrainBatch
    assert joined.batch_size == (count,)
    assert list(joined.words) == [str(length) for length in lengths]
    assert (joined.note, joined.extra, joined.inner.reference_logprobs_BL) == (
        "same for all",
        None,
        None,
    )
    both_BL = joined.inner.advantages_BL + joined.inner.sampler_logprobs_BL
    torch.testing.assert_close(both_BL.values(), logprobs_BL.values() * 3)


def test_jagged_rows_with_gaps_are_sent_without_them() -> None:
    gappy = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([0, 5, 10]), lengths=torch.tensor([2, 3])
    )
    arrived = _through_ray(gappy)
    assert arrived.values().tolist() == [0, 1, 5, 6, 7]
    assert take_rows(gappy, 1, 2).values().tolist() == [5, 6, 7]


def test_what_has_no_rows_is_no_payload() -> None:
    assert not is_payload(torch.tensor(1.0))
    assert not is_payload(TensorDict({"x": torch.ones(2)}))
    assert is_payload(jagged_from(torch.ones(1), torch.tensor([1])))


@pytest.mark.parametrize(("size", "num_buffers"), [(3, 0), (3000, 1)])
def test_small_tensors_need_no_buffer_of_their_own(size: int, num_buffers: int) -> None:
    buffers: list[pickle.PickleBuffer] = []
    cloudpickle.dumps([torch.zeros(size)], protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == num_buffers


@pytest.mark.parametrize("size", [3, 3000])
def test_a_write_into_a_received_tensor_is_reported_once(size: int) -> None:
    kept = _through_ray({"x": torch.zeros(size)})["x"]
    payload.raise_if_written()
    kept.view(size)[1] = 2.0
    with pytest.raises(ReadOnlyError, match=rf"float32 tensor of shape \[{size}\]"):
        payload.raise_if_written()
    payload.raise_if_written()
