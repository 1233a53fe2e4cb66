"""Calls into CUDA that SGLang makes without asking whether there is any.

They are answered in the processes of a server alone, which run the plug-in of this package: pinned
memory is ordinary memory (pinning makes copies faster, and nothing else), and three calls that mean
nothing on a CPU do nothing **when the named modules of SGLang make them**. From anywhere else they
raise as torch made them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")
"""Of them LoRA and the overlap schedule ask for pinned memory."""

WEIGHTS_CHECKER = ("sglang.srt.utils.weight_checker", "sglang.srt.utils.weight_checker_comparator")
"""Brings what it compares to the device, and waits for the device before it looks at the clock."""

HOST_CACHES = ("sglang.srt.mem_cache.pool_host.common",)
"""Registers host memory with CUDA: routed experts are kept there."""


def install() -> None:
    """Replace the calls in this process. Idempotent."""
    if isinstance(torch.cuda.cudart, _AnsweredFor):
        return
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    tensors: Any = torch.Tensor
    package: Any = torch
    tensors.pin_memory = lambda tensor, *_device: tensor
    tensors.cuda = _method(_AnsweredFor(WEIGHTS_CHECKER, tensors.cuda, lambda self: self))
    torch.cuda.synchronize = _AnsweredFor(WEIGHTS_CHECKER, torch.cuda.synchronize, lambda: None)
    package.get_device_module = _on_a_cpu(torch.get_device_module)
    torch.cuda.cudart = _AnsweredFor(HOST_CACHES, torch.cuda.cudart, _HostMemory)


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        keywords.pop("pin_memory", None)
        return factory(*arguments, **keywords)

    return make


def _on_a_cpu(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.cpu`` where no device is named: a build with CUDA returns its module."""
    return lambda device=None: torch.cpu if device is None else stock(device)


class _AnsweredFor:
    """A function with an answer of its own for callers in some modules."""

    def __init__(
        self, modules: tuple[str, ...], original: Callable[..., Any], answer: Callable[..., Any]
    ) -> None:
        self._modules = modules
        self._original = original
        self._answer = answer

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.call_for(sys._getframe(1).f_globals["__name__"], *arguments, **keywords)

    def call_for(self, module: str, *arguments: Any, **keywords: Any) -> Any:
        chosen = self._answer if module in self._modules else self._original
        return chosen(*arguments, **keywords)


def _method(function: _AnsweredFor) -> Callable[..., Any]:
    def method(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        return function.call_for(caller, tensor, *arguments, **keywords)

    return method


class _HostMemory:
    """CUDA's run-time library as far as host memory goes: registering succeeds, doing nothing."""

    def cudaHostRegister(self, _pointer: int, _num_bytes: int, _flags: int) -> int:
        return 0

    def cudaHostUnregister(self, _pointer: int) -> int:
        return 0
