"""What megatron-core needs of ``torch.cuda`` on a machine without it.

``install()`` makes the real megatron-core 0.16.1 run on a CPU with gloo. Its modules, and they
alone, get another ``torch`` to look names up in: the same objects, but ``cuda`` answers for the CPU
and ``device="cuda"`` is where the CPU is. Nothing of torch itself is changed, so that FSDP2, the
embedded engine and whatever else lives in the process see the machine as it is; being a matter of
modules and not of a mode, it holds in every thread. Four further stand-ins go round places that
this does not reach.

torch.distributed's part of mcore's own checkpoints (``dist_checkpointing``) is not reached: it is
imported on demand, and nothing here uses it.

A run takes it with ``cluster.worker_setup_hook=tests.megatron.stand_ins.install``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_MODULES = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
)
"""What training engines import; what these import is reached as well."""

_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def install() -> None:
    """Import megatron-core so that it works without CUDA; nothing where CUDA is available.

    Again and again is fine, and reaches modules of megatron that were imported since.
    """
    if torch.cuda.is_available():
        return
    # Before the import: it decorates small functions with torch.compile, which on a CPU means
    # minutes of g++.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import_megatron()
    _look_up_in(_torch_for_megatron())
    for module, path in _ASK_TENSORS_FOR_CUDA:
        _ask_as_if_on_cuda(module, path)
    _draw_from_the_only_generator()
    _convert_splits_on_a_cpu()
    _offload_as_if_from_a_device()


def import_megatron() -> None:
    """Import what engines use, without the warnings that megatron gives while it is imported.

    They say that TransformerEngine and Apex are absent, and that megatron's own modules import
    each other under old names.
    """
    with warnings.catch_warnings():
        for category in (UserWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"megatron\.core\b")
        with _without_wandb():
            for name in _MODULES:
                import_module(name)


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Megatron's inference, which nothing here uses, imports it: 1.5 s of CPU."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


def _look_up_in(stand_in: ModuleType) -> None:
    """Let ``torch`` in every module of megatron be ``stand_in``."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = stand_in


@functools.cache
def _torch_for_megatron() -> ModuleType:
    """Copy the module torch, its ``cuda`` (S1, S3, S6) and its factories (S4) replaced."""
    cuda = _copy(torch.cuda)
    for change in (_device_is_the_cpu, _no_queue_to_wait_for, _streams_do_nothing, _one_generator):
        vars(cuda).update(change())
    stand_in = _copy(torch)
    vars(stand_in).update({name: _on_the_cpu(getattr(torch, name)) for name in _FACTORIES})
    vars(stand_in)["cuda"] = cuda
    return stand_in


def _copy(module: ModuleType) -> ModuleType:
    # A copied ``__getattr__`` goes on finding what the module imports on demand.
    copied = ModuleType(module.__name__, module.__doc__)
    vars(copied).update(vars(module))
    return copied


def _device_is_the_cpu() -> dict[str, Any]:
    """S1: every module allocates on ``torch.cuda.current_device()``."""
    return {"current_device": lambda: CPU}


def _no_queue_to_wait_for() -> dict[str, Any]:
    """S3: pipeline messages synchronise the device; timers name ranges for its profiler."""
    nvtx = _copy(torch.cuda.nvtx)
    vars(nvtx).update(range_push=_nothing, range_pop=_nothing)
    return {"synchronize": _nothing, "empty_cache": _nothing, "nvtx": nvtx}


def _streams_do_nothing() -> dict[str, Any]:
    """S6: the all-to-all dispatcher of experts copies on a stream of its own."""
    return {
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda *_: contextlib.nullcontext(),
    }


def _one_generator() -> dict[str, Any]:
    """S2: a CPU has one random generator, and megatron asks for the device's."""
    return {
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
    }


class _Stream:
    """A stream or an event of a device that does everything at once, and is asked whatever."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self


def _nothing(*_: object, **__: object) -> None:
    pass


def _on_the_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """S4: loss scales, norms and counters are made with ``device="cuda"`` spelled out."""

    @functools.wraps(factory)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = CPU
        return factory(*args, device=device, **kwargs)

    return made


_ASK_TENSORS_FOR_CUDA = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
    (
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
)
"""Where tensors themselves are asked: methods, which no module's name leads to."""


def _ask_as_if_on_cuda(module_name: str, path: str) -> None:
    """S5, and what is left of S4: let the function see ``Tensor.type()`` and ``.cuda()`` of CUDA.

    Optimizers sort parameters by ``param.type() == "torch.cuda.FloatTensor"``, a tied head moves
    its weight with ``.cuda()``. The mode lasts as long as a call.
    """
    owner: Any = import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with _AsIfOnCuda():
            return original(*args, **kwargs)

    setattr(owner, name, asked)


class _AsIfOnCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        answer = func(*args, **(kwargs or {}))
        if func is Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _draw_from_the_only_generator() -> None:
    """S2, the rest: ``fork()`` restores the CPU's generator and the device's, which here are one.

    The order of the two decides which state is left, so that the whole is done for one.
    """
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.CudaRNGStatesTracker.fork = _fork


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    before, name_before = torch.get_rng_state(), tracker._current_state_name
    if name_before != "default-rng":
        tracker.states_[name_before] = before
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(tracker.states_.get(name_before, before))
        tracker._current_state_name = name_before


def _convert_splits_on_a_cpu() -> None:
    """S7: ``maybe_move_tensor_to_cpu(as_numpy=True)`` leaves alone what is on the CPU already."""

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher: Any = import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = moved


def _offload_as_if_from_a_device() -> None:
    """S8: an optimizer that offloads asks each tensor whether it is on the device, and pins the
    copy that it takes of one to the host: such a copy, and what is cast of it, is on no device.
    """
    module = import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    kind = module.HybridDeviceOptimizer
    original = kind._get_sub_optimizer_param_groups
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def asked(self: Any, offload_fraction: float) -> Any:
        with _TellsHostFromDevice():
            return original(self, offload_fraction)

    kind._get_sub_optimizer_param_groups = asked


class _TellsHostFromDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._on_host: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not self._is_on_host(args[0])
        if func is Tensor.pin_memory:
            self._on_host.append(args[0])
            return args[0]
        answer = func(*args, **(kwargs or {}))
        if func in (Tensor.detach, Tensor.clone, Tensor.float) and self._is_on_host(args[0]):
            self._on_host.append(answer)
        return answer

    def _is_on_host(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self._on_host)
