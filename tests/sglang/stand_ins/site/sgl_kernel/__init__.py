"""Stands in for SGLang's kernel package on a machine without CUDA.

The package index has builds of ``sgl_kernel`` for CUDA alone, yet SGLang imports it on a CPU too.
SGLang looks for operators under ``torch.ops.sgl_kernel``, finds none, and takes its own
implementations in plain torch. What it calls all the same has a body here: one function, and the
hash behind seeds. Any other name can be imported, as modules do for kernels they never call, and
raises when called.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from sgl_kernel import seeded_hash  # noqa: F401

if torch.cuda.is_available():
    raise ImportError(
        "this sgl_kernel stands in for SGLang's kernels on a machine without CUDA, and this one "
        "has it: delete the folder of this file, then pip install 'hybridrl[sglang]'"
    )

__version__ = "0.0.0+stand.in"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    _pool_width: int,
) -> None:
    """Write each request's new cache slots into its row: ``req_to_token[r, start:end]``.

    Arguments in SGLang's names and order: int [B] rows, int [rows, width] table (written to),
    int [B] first and int [B] past-the-last columns, int [sum of lengths] slots, one after another.
    """
    lengths = (end_offset - start_offset).tolist()
    slots_of_requests = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, slots in zip(
        req_pool_indices.tolist(), start_offset.tolist(), slots_of_requests, strict=True
    ):
        req_to_token[row, start : start + len(slots)] = slots


class _MissingKernel:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_arguments: object, **_keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{self.__name__} was called, and it has no stand-in for a CPU; choose "
            "server arguments that do not need it, or write it in tests/sglang/stand_ins"
        )


def __getattr__(name: str) -> _MissingKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingKernel(name)
