"""Torch tensors, TensorDicts and TensorClasses on their way through Ray, jagged ones included.

Import it for its effect: it registers itself with `hybridrl.single_controller`. Tensors go as
plain bytes out of band, so that the reader maps shared memory instead of copying; small ones go
in the message. Of a slice only its own bytes are sent; Ray's own switch for zero-copy tensors sends
the full storage of a view. They arrive on the CPU and without gradient, wherever they come from.

Received tensors are read-only by contract: the memory belongs to all readers of the object. A
worker that writes into one in place gets `ReadOnlyError` at the end of the call, because torch
counts writes. (Writes through ``.data`` or ``.numpy()`` are not counted.) Clone before writing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from tensordict import TensorCollection
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # no public name for its type

from hybridrl.errors import ReadOnlyError
from hybridrl.single_controller.payload import (
    PayloadOps,
    register_after_call,
    register_payload,
    register_reducer,
)

# Weak, because a driver receives tensors too and never asks. By id: tensors compare elementwise.
_received: dict[int, ref[Tensor]] = {}


_SMALL_BYTES = 8192
"""Tensors up to this size are copied into the message: reading one takes 7 us there, and 37 us from
a buffer of its own. Each response of a rollout has two."""


class _WritableAlias:
    """The memory of a read-only array, without the flag at which torch warns."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the memory alive
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def raise_if_written() -> None:
    """Raise `ReadOnlyError` if a received tensor was written to in place since it came."""
    for key, reference in list(_received.items()):
        tensor = reference()
        if tensor is not None and tensor._version:
            del _received[key]
            raise ReadOnlyError(
                f"the worker wrote in place into a received {tensor.dtype} tensor of shape "
                f"{list(tensor.shape)}; other ranks read the same memory: clone() it before writing"
            )


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        # torch's own way: rare and small
        plain: tuple[Any, ...] = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return plain
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data_bytes = data.reshape(-1).view(torch.uint8).numpy()
    is_small = 0 < data.nbytes <= _SMALL_BYTES
    sent = data_bytes.tobytes() if is_small else data_bytes
    return _restore_tensor, (sent, tensor.dtype, tuple(tensor.shape))


def _restore_tensor(
    sent: bytes | np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if isinstance(sent, bytes):
        tensor = torch.frombuffer(bytearray(sent), dtype=dtype).reshape(shape)
    else:
        tensor = torch.from_numpy(np.asarray(_WritableAlias(sent))).view(dtype).reshape(shape)
    key = id(tensor)
    _received[key] = ref(tensor, lambda _: _received.pop(key, None))
    return tensor


def _reduce_jagged(tensor: Any) -> tuple[Any, ...]:  # noqa: ANN401 - NestedTensor has no stubs
    if tensor.lengths() is not None:  # rows with gaps between them
        tensor = tensor.contiguous()
    return _restore_jagged, (tensor.values(), tensor.offsets(), tensor._ragged_idx)


def _restore_jagged(values: Tensor, offsets: Tensor, jagged_dim: int) -> Tensor:
    # Fields that shared their offsets share them again (pickle sends the one object once), and
    # only then does torch let them meet in one operation.
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim)


def _take_jagged(tensor: Any, start: int, stop: int) -> Tensor:  # noqa: ANN401
    """Slice rows of a bare jagged tensor, which torch cannot (TensorDict can, for its fields)."""
    if tensor.lengths() is not None:
        tensor = tensor.contiguous()
    offsets = tensor.offsets()[start : stop + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    values = tensor.values().narrow(tensor._ragged_idx - 1, begin, end - begin)
    return _restore_jagged(values, offsets - begin, tensor._ragged_idx)


def _concat_tensors(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = parts[0]
    if not all(part.device.type == "cpu" and part.dtype == first.dtype for part in parts):
        return torch.cat(list(parts), dim=dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if 0 in shape:
        return torch.cat(list(parts), dim=dim)
    # numpy asks the kernel for huge pages and torch does not: 256 MB in 24 ms instead of 120 ms.
    memory = np.empty(math.prod(shape) * first.itemsize, np.uint8)
    joined = torch.from_numpy(memory).view(first.dtype).reshape(shape)
    return torch.cat([part.detach() for part in parts], dim=dim, out=joined)


def _concat_jagged(parts: Sequence[Any], offsets: Tensor | None = None) -> Tensor:
    parts = [part.contiguous() for part in parts]
    if offsets is None:
        lengths = torch.cat([part.offsets().diff() for part in parts])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    jagged_dim = parts[0]._ragged_idx
    values = _concat_tensors([part.values() for part in parts], dim=jagged_dim - 1)
    return _restore_jagged(values, offsets, jagged_dim)


def _concat_collections(parts: Sequence[Any]) -> Any:  # noqa: ANN401 - TensorDict or TensorClass
    """Join field by field; jagged fields that shared their row lengths share them again."""
    leaves = parts[0].items(include_nested=True, leaves_only=True)
    keys = [key for key, value in leaves if isinstance(value, Tensor)]
    others = [part.exclude(*keys) for part in parts]  # values that are not tensors
    joined: Any = torch.cat(others, dim=0)
    shared: dict[tuple[int, ...], Tensor] = {}
    for key in keys:
        members = [part.get(key) for part in parts]
        if isinstance(members[0], NestedTensor):
            rows = tuple(id(member.offsets()) for member in members)
            field = _concat_jagged(members, shared.get(rows))
            shared[rows] = field.offsets()  # type: ignore[attr-defined]  # of nested tensors
        else:
            field = _concat_tensors(members)
        joined.set(key, field)
    return joined


register_reducer(Tensor, _reduce_tensor)
register_reducer(NestedTensor, _reduce_jagged)
register_after_call(raise_if_written)
register_payload(
    Tensor,
    PayloadOps(
        num_rows=lambda tensor: tensor.shape[0],
        take=lambda tensor, start, stop: tensor[start:stop],
        concat=_concat_tensors,
        accepts=lambda tensor: tensor.ndim > 0,
    ),
)
register_payload(
    NestedTensor,
    PayloadOps(num_rows=lambda tensor: tensor.shape[0], take=_take_jagged, concat=_concat_jagged),
)
register_payload(
    TensorCollection,
    PayloadOps(
        num_rows=lambda batch: batch.batch_size[0],
        take=lambda batch, start, stop: batch[start:stop],
        concat=_concat_collections,
        accepts=lambda batch: len(batch.batch_size) > 0,
    ),
)
