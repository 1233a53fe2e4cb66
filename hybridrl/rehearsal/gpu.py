"""One GPU without a GPU: tensors on ``cuda`` have shapes, types and bytes, and no values.

``FakeGpu`` is torch's ``FakeTensorMode`` behind a dispatch mode: an operator that makes a tensor on
``cuda``, or reads one, is checked (types, shapes, strides, devices) and computes nothing. Small
tensors on the host stay real, so that the program around the model runs as usual; large ones are
fake, too. Every fake storage is counted from its birth to its death, as torch's allocator would.

Works with any build of torch, also one for CPUs: to autograd's C++ a fake tensor is on torch's
device for back ends in Python (``privateuse1``), to Python it is on ``cuda``. That is settled for
the process, so a rehearsal has a process of its own.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hybridrl.rehearsal.device import GPU, Block, Memory, Signal, Stream, answers, use_of_caller

_IN_CPP = "rehearsed"
"""Name of ``cuda`` in autograd's C++."""

_LARGE = 2**24
"""Bytes from which a tensor that is made on the host has no values."""

_LARGE_COPY = 2**20
"""Bytes from which a tensor that comes from the GPU has none; smaller ones are zeros."""

_BLOCK = 512
"""torch's allocator hands out multiples of so many bytes."""

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8

_OF_NCCL = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
)
"""Types that NCCL sends (ProcessGroupNCCL.cpp, ncclDataType)."""

_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_OF_ONE_KERNEL = ("silu_backward", "_fused_rms_norm")
"""Where a build has no kernel for CUDA, torch computes these by their parts, and keeps them."""

_SHAPED_BY_VALUES: dict[str, Callable[[Any, Any, float], tuple[int, ...]]] = {
    "nonzero": lambda args, _, __: (args[0].numel(), args[0].dim()),
    "bincount": lambda args, named, _: (args[2] if len(args) > 2 else named.get("minlength", 0),),
    "masked_select": lambda args, _, share: (round(args[1].numel() * share),),
}
"""Shapes for arguments, keyword arguments and the share of a mask that is True."""

_SELECT: Any = torch.ops.aten.index.Tensor
_SHAPES_ALONE = torch._C._TorchDispatchModeKey.FAKE


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its block ``torch.cuda`` is the first GPU, and its tensors are fake. Once a process."""

    def __init__(self, *, num_bytes: int, num_devices: int = 8) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.torch = Memory()
        """Memory of the GPU that tensors of this process hold."""
        self.device = Memory()
        """Memory of the GPU that anybody holds."""
        self.host = Memory()
        """Large tensors of this process on the host."""
        self.num_bytes = num_bytes
        self.events: Counter[str] = Counter()
        """Copies between host and GPU and synchronisations, with the product's line."""
        self.share_selected = 1.0
        """Of the elements of a mask on the GPU those that are taken for True."""
        self._blocks: dict[int, tuple[Block, object]] = {}
        self._pinned: set[int] = set()
        self._fake = FakeTensorMode()
        _be_two_devices()
        self._patch_cuda(num_devices)
        self._patch_modules()
        _patch_attention()
        self._patch_tensors()
        self._patch_storages()

    # -- storages --------------------------------------------------------------------------------

    def name(self, tensors: Iterable[Tensor], use: str) -> None:
        """Give tensors that last the name of their use."""
        for tensor in tensors:
            known = self._blocks.get(tensor.untyped_storage()._cdata)
            if known is not None:
                known[0].use = use

    def _count(self, leaf: object) -> None:
        if not isinstance(leaf, FakeTensor):
            return
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        block = Block(0, leaf.fake_device, use_of_caller())

        def end(_: object) -> None:
            self._resize(block, 0)
            del self._blocks[key]
            self._pinned.discard(key)

        self._blocks[key] = (block, weakref.ref(storage, end))
        self._resize(block, storage.nbytes())

    def _resize(self, block: Block, num_bytes: int) -> None:
        taken = -(-num_bytes // _BLOCK) * _BLOCK
        more, block.num_bytes = taken - block.num_bytes, taken
        ledgers = (self.torch, self.device) if block.device.type == "cuda" else (self.host,)
        for ledger in ledgers:
            ledger.change(block, more)

    # -- torch -----------------------------------------------------------------------------------

    def _patch_cuda(self, num_devices: int) -> None:
        def reset_peaks(*_: object) -> None:
            for memory in (self.torch, self.device, self.host):
                memory.reset_peak()

        cuda: Any = torch.cuda
        for name, answer in answers(self.num_bytes, num_devices).items():
            for module in (cuda, cuda.random) if hasattr(cuda.random, name) else (cuda,):
                setattr(module, name, lambda *_, answer=answer, **__: answer)
        cuda.default_generators = tuple(torch.Generator() for _ in range(num_devices))
        cuda.empty_cache = lambda: setattr(self.torch, "reserved", self.torch.allocated)
        cuda.mem_get_info = lambda *_: (self.free_bytes(), self.num_bytes)
        cuda.memory_allocated = lambda *_: self.torch.allocated
        cuda.max_memory_allocated = lambda *_: self.torch.peak
        cuda.memory_reserved = lambda *_: self.torch.reserved
        cuda.reset_peak_memory_stats = reset_peaks
        cuda.synchronize = lambda *_: self._note("synchronize")
        cuda.Stream, cuda.Event, cuda.stream = Stream, Signal, lambda _: nullcontext()
        # FSDP2 asks for it where it gathered weights that no gradient needed: a frozen tower's.
        torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore[assignment]

    def _patch_modules(self) -> None:
        """Let modules be made on the host, and moved."""
        make_parameter = Parameter.__new__

        def new_parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if type(data) is Tensor and data.device.type == "cpu":  # else it could not be moved
                data = self.on_host(data.shape, data.dtype)
            return make_parameter(cls, data, *args, **kwargs)

        Parameter.__new__ = new_parameter  # type: ignore[method-assign]
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.swap_tensors = _swap

    def _patch_tensors(self) -> None:
        """Replace methods whose C++ would ask the driver, or name the wrong device."""
        for name in ("tensor", "as_tensor"):
            setattr(torch, name, _on_first_gpu(getattr(torch, name)))
        plain: Any = Tensor
        move, type_of = plain.to, plain.type

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            moved: Tensor = move(
                tensor,
                *(GPU if isinstance(arg, str) and arg == "cuda" else arg for arg in args),
                **{n: GPU if v == "cuda" and n == "device" else v for n, v in kwargs.items()},
            )
            return moved

        def type_(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            answer = type_of(tensor, *args, **kwargs)
            return answer.replace(_IN_CPP, "cuda") if isinstance(answer, str) else answer

        plain.to = to
        plain.new_tensor = lambda tensor, data, **given: torch.tensor(
            data, **{"dtype": tensor.dtype, "device": tensor.device, **given}
        )
        plain.cuda = lambda tensor, *_, **__: tensor.to(GPU)
        plain.is_pinned = lambda tensor, *_: tensor.untyped_storage()._cdata in self._pinned
        plain.pin_memory = lambda tensor, *_: torch.empty_like(tensor, pin_memory=True).copy_(
            tensor
        )
        fake: Any = FakeTensor
        fake.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
        fake.type = type_

    def _patch_storages(self) -> None:
        """Count the bytes that a storage gives back or takes, and name its device."""
        storage: Any = UntypedStorage
        resize, device = storage.resize_, storage.device

        def resize_(storage: UntypedStorage, num_bytes: int) -> UntypedStorage:
            known = self._blocks.get(storage._cdata)
            if known is not None:
                self._resize(known[0], num_bytes)
            resized: UntypedStorage = resize(storage, num_bytes)
            return resized

        def device_of(storage: UntypedStorage) -> Any:  # noqa: ANN401
            known = self._blocks.get(storage._cdata)
            return device.__get__(storage) if known is None else known[0].device

        storage.resize_, storage.device = resize_, property(device_of)

    def free_bytes(self) -> int:
        """Return the bytes that the driver would call free."""
        cached = self.torch.reserved - self.torch.allocated
        return self.num_bytes - self.device.allocated - cached

    def on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the host without values, whatever its size."""
        with self._fake:
            made = torch.empty(tuple(shape), dtype=dtype)
        self._count(made)
        return made

    def hold(self, block: Block, num_bytes: int) -> None:
        """Let somebody besides torch have so many bytes of the GPU."""
        more, block.num_bytes = num_bytes - block.num_bytes, num_bytes
        self.device.change(block, more)

    # -- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(  # noqa: C901 - one way through for each kind of operator
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if func is torch.ops.prim.device.default:
            return self._device_in_cpp(args[0])
        if any(kind not in (Tensor, Parameter, FakeTensor) for kind in types):
            return NotImplemented  # DTensor divides itself first
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_SHAPES_ALONE) is not None:
            return func(*args, **kwargs)  # DTensor asks for the shape of a result
        device = kwargs.get("device")
        if isinstance(device, torch.device) and device.type == _IN_CPP:
            kwargs = {**kwargs, "device": GPU}
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if func is _SELECT:  # by a mask: the places where it is True
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        if not is_pinned and not _is_without_values(args, kwargs, tensors):
            return func(*args, **kwargs)
        if _makes_view(func) and isinstance(args[0], FakeTensor):
            return self._view(func, args, kwargs)
        out = self._without_values(func, args, kwargs)
        if out is None:
            out = self._compute_shapes(func, args, kwargs, tensors)
        is_alias = any(each.alias_info is not None for each in func._schema.returns)
        if not is_pinned and not is_alias:
            out = _real_if_small(out) if isinstance(out, Tensor) else tree_map(_real_if_small, out)
        for leaf in (out,) if isinstance(out, Tensor) else tree_iter(out):
            self._count(leaf)
        if is_pinned and isinstance(out, FakeTensor):
            self._pinned.add(out.untyped_storage()._cdata)
        return out

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Make views by torch's own kernel for tensors without memory, the quickest way."""
        with in_kernel_invocation_manager(self._fake):
            views = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(views, Tensor):
            return FakeTensor(self._fake, views, device)
        return [FakeTensor(self._fake, view, device) for view in views]

    def _compute_shapes(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
        if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
            # Not by torch's own conversion: it keeps a weak reference to each tensor, and a
            # parameter that has one cannot be moved.
            with self._fake:
                args, kwargs = tree_map(_without_value, (args, kwargs))
        # Else its views of a storage that was emptied would fill it again.
        self._fake.cache_enabled = not any(
            isinstance(first, FakeTensor) and first.numel() and not first.untyped_storage().nbytes()
            for first in tensors[:1]
        )
        with self._fake:
            return func(*args, **kwargs)

    def _places(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return the indices by which a kernel takes what a mask on the GPU selects."""
        if not isinstance(index, FakeTensor) or index.dtype != torch.bool:
            return (index,)
        self._note("nonzero", index)
        num_places = round(index.numel() * self.share_selected)
        with self._fake:
            return index.new_empty((index.dim(), num_places), dtype=torch.int64).unbind()

    def _device_in_cpp(self, tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        return torch.device(_IN_CPP, 0) if tensor.fake_device.type == "cuda" else tensor.fake_device

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Answer operators whose result depends on values, or on a storage; else None."""
        name: str = func.__name__
        first: Any = args[0] if args else None
        if name.startswith(("_flash_attention_forward", "_flash_attention_backward")):
            _require_for_flash(args[:8] if "backward" in name else args[:5])
        if name.startswith("_local_scalar_dense"):
            self._note("item()", first)
            return 1.0 if first.is_floating_point() else 1
        if name.startswith(("copy_.", "_to_copy.")):
            self._note_copy(name, args, kwargs)
            is_into_values = name.startswith("copy_") and not isinstance(first, FakeTensor)
            return first if is_into_values else None
        if func.namespace == "c10d":
            _require_for_nccl(func, args)
            return FakeWork().boxed() if "coalesced" in name else None
        for kind, shape_of in _SHAPED_BY_VALUES.items():
            if name.startswith(f"{kind}."):
                self._note(kind, first)
                shape = shape_of(args, kwargs, self.share_selected)
                dtype = first.dtype if kind == "masked_select" else torch.int64
                with self._fake:
                    return torch.empty(shape, dtype=dtype, device=first.device)
        return None

    def _note_copy(self, name: str, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        is_copy = name.startswith("copy_")
        source, target = (args[1], args[0].device) if is_copy else (args[0], kwargs.get("device"))
        target = torch.device(target or source.device)
        if source.device.type == target.type:
            return
        is_asked = kwargs.get("non_blocking") or (is_copy and len(args) > 2 and args[2])
        host = args[0] if is_copy and target.type == "cpu" else source
        overlaps = is_asked and (host.is_pinned() or (not is_copy and target.type == "cpu"))
        self._note(f"copy {source.device.type} -> {target.type}" + ", blocking" * (not overlaps))

    def _note(self, what: str, tensor: Tensor | None = None) -> None:
        if tensor is None or tensor.device.type == "cuda":
            self.events[f"{what} at {_line_of_product()}"] += 1


def _be_two_devices() -> None:
    """Let Python see ``cuda`` where C++ sees a device for which autograd has all it needs."""
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[method-assign,assignment]
    torch.cuda._lazy_init = lambda: None
    _setup_privateuseone_for_python_backend(rename=_IN_CPP)
    torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003
    for convolution in ("convolution", "convolution_backward"):  # else asks the build for cuDNN
        op_implementations_dict.pop(getattr(torch.ops.aten, convolution).default)
    for name in _OF_ONE_KERNEL:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _KERNELS.impl(name, _never_computed, "CUDA")  # type: ignore[no-untyped-call]


def _never_computed(*_: Any) -> Any:  # noqa: ANN401 - of any operator
    """Stand where a kernel must be: operators without values end before it."""
    raise AssertionError


def _require_for_flash(args: Sequence[Tensor]) -> None:
    """Refuse what the kernel for rows end to end does (flash_api.cpp, mha_varlen_fwd and _bwd).

    ``args`` are query, key and value; or their gradient's, these, the output and log-sum-exps; and
    the offsets of both.
    """
    *columns, query_offsets, key_offsets = args
    is_backward = len(columns) > 3
    heads = columns[:-1] if is_backward else columns
    size, dtypes = heads[0].shape[-1], {each.dtype for each in heads}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if size > _LARGEST_HEAD or size % _HEAD_MULTIPLE:
        raise RuntimeError(f"FlashAttention takes heads of 8 to 256 in steps of 8, and not {size}")
    if any(each.stride(-1) != 1 for each in heads):
        raise RuntimeError("FlashAttention takes tensors with a contiguous last dimension")
    if is_backward and not columns[-1].is_contiguous():  # the kernel would read it wrongly
        raise RuntimeError("FlashAttention takes contiguous log-sum-exps")
    for offsets in (query_offsets, key_offsets):
        if offsets.dtype != torch.int32 or not offsets.is_contiguous() or not offsets.is_cuda:
            raise RuntimeError("FlashAttention takes offsets in int32 on the GPU")


def _require_for_nccl(func: Any, args: Any) -> None:  # noqa: ANN401
    """Refuse what NCCL does, on a device where it would be asked."""
    for tensor in _tensors_in(args):
        if tensor.device.type != "cuda":
            continue
        if not tensor.is_contiguous():
            raise RuntimeError(f"{func}: Tensors must be contiguous")
        if tensor.dtype not in _OF_NCCL:
            raise RuntimeError(f"{func}: {tensor.dtype} is not supported for NCCL process group")


def _patch_attention() -> None:
    """Let attention take CUDA's memory-efficient kernel: of this device torch has none.

    It would write ``R * N * L * K`` scores, which a run on a GPU refuses to do.
    """
    functional: Any = torch.nn.functional
    attend_by_choice = functional.scaled_dot_product_attention

    def attend(
        query_RNLD: Tensor,
        key_RNKD: Tensor,
        value_RNKD: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        if not query_RNLD.is_cuda or options.get("enable_gqa"):  # the kernel takes equal heads
            done: Tensor = attend_by_choice(
                query_RNLD, key_RNKD, value_RNKD, attn_mask, dropout_p, is_causal, **options
            )
            return done
        bias = attn_mask
        if attn_mask is not None:  # as torch does before the kernel
            if attn_mask.dtype == torch.bool:
                bias = torch.where(attn_mask, 0.0, -torch.inf).to(query_RNLD.dtype)
            bias = bias.expand(*query_RNLD.shape[:2], query_RNLD.shape[2], key_RNKD.shape[2])  # type: ignore[union-attr]
        attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query_RNLD,
            key_RNKD,
            value_RNKD,
            bias,
            torch.is_grad_enabled(),
            dropout_p,
            is_causal,
            scale=options.get("scale"),
        )[0]
        return attended

    functional.scaled_dot_product_attention = attend


def _on_first_gpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def value_of(leaf: object) -> object:
        return leaf.item() if isinstance(leaf, FakeTensor) else leaf

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if device is None:  # of a block ``with device:``, of which only torch's functions know
            modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
            device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
        is_gpu = device is not None and torch.device(device).type == "cuda"
        if isinstance(data, list | tuple):
            data = tree_map(value_of, data)
        return make(data, *args, device=GPU if is_gpu else device, **kwargs)

    return made


def _swap(old: Tensor, new: Tensor) -> None:
    """Let ``Module.to()`` move a parameter that stays the same object with its marks.

    torch's own refuses tensors with weak references, which each fake tensor has.
    """
    if (old.device, old.dtype) == (new.device, new.dtype):
        return
    torch._C._swap_tensor_impl(old, new)
    old.__class__, new.__class__ = new.__class__, old.__class__
    vars(old).update(vars(new))


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _is_without_values(args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:  # noqa: ANN401
    """Whether an operator's result has no values: on the GPU, of such tensors, or large."""
    if (device := kwargs.get("device")) is not None:
        kind = torch.device(device).type
        if kind in ("cuda", "meta"):
            return kind == "cuda"
    if tensors:
        return any(isinstance(tensor, FakeTensor) for tensor in tensors)
    size = args[0] if args and isinstance(args[0], list | tuple | torch.Size) else ()
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return math.prod(size) * dtype.itemsize >= _LARGE


@cache
def _makes_view(func: Any) -> bool:  # noqa: ANN401
    returns = func._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and not alias.is_write and func.namespace == "aten"


def _without_value(leaf: object) -> object:
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


def _real_if_small(leaf: object) -> object:
    """Give a small tensor on the host values: zeros."""
    if not isinstance(leaf, FakeTensor) or leaf.fake_device.type != "cpu":
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.nbytes < _LARGE_COPY else leaf


# -- places in the program -----------------------------------------------------------------------


def _line_of_product() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, is_product, file = frame.f_code.co_filename.rpartition("/hybridrl/")
        if is_product and not file.startswith("rehearsal/"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
