"""A row as a tensor, to travel with a batch. Rows themselves need no torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.data.rows import Row, read_record, write_record


def encode_row(row: Row) -> Tensor:
    """Write a row as a tensor: uint8 [n]."""
    data = row.origin.encode() + b"\0" + write_record(row)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_row(data: Tensor) -> Row:
    """Read a row from ``encode_row``."""
    origin, _, record = data.numpy().tobytes().partition(b"\0")
    return read_record(record, origin=origin.decode())
