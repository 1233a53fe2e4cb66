"""``sgl_kernel::murmur_hash32_cpu``: the random numbers of a request that has a seed of its own.

In SGLang's words a MurmurHash3 of (64-bit seed, 32-bit position, 32-bit column), which are four
blocks of 32 bits; https://en.wikipedia.org/wiki/MurmurHash. Held against SGLang's Triton kernel by
tests/sglang/test_stand_ins.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_NUM_BYTES_HASHED = 16


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Hash each row's seed and position with each column: uint64 [N], int [N], int [M] -> [N, M].

    The result is uint32. Computed in int64, where the low half of a product is exact.
    """
    seed_N1 = seed.to(torch.int64)[:, None]
    hash_NM = torch.zeros(len(seed), len(col_indices), dtype=torch.int64)
    for block in (seed_N1, seed_N1 >> 32, positions[:, None], col_indices[None]):
        hash_NM = _mix(hash_NM, block.to(torch.int64) & _LOW_32)
    return _finish(hash_NM ^ _NUM_BYTES_HASHED).to(torch.uint32)


def _mix(hashes: Tensor, block: Tensor) -> Tensor:
    block = _rotated(block * 0xCC9E2D51 & _LOW_32, 15)
    hashes = _rotated(hashes ^ (block * 0x1B873593 & _LOW_32), 13)
    return hashes * 5 + 0xE6546B64 & _LOW_32


def _rotated(values: Tensor, num_bits: int) -> Tensor:
    return (values << num_bits | values >> 32 - num_bits) & _LOW_32


def _finish(hashes: Tensor) -> Tensor:
    hashes = (hashes ^ hashes >> 16) * 0x85EBCA6B & _LOW_32
    hashes = (hashes ^ hashes >> 13) * 0xC2B2AE35 & _LOW_32
    return hashes ^ hashes >> 16
