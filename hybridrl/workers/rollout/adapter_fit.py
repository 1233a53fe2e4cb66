"""Whether an adapter fits an engine, checked name by name before the engine gets any tensor.

SGLang (0.5.21) does not check it. If it knows none of an adapter's names, it loads the adapter
without an error and the frozen model answers. An adapter that lacks a matrix or has another rank
than it declares ends the server at the next request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from hybridrl.errors import EngineError, first_of

Shapes = Mapping[str, tuple[int, ...]]


def require_fit(tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Refuse (EngineError) an adapter without exactly the names and shapes of adapted layers."""
    came, taken = tensors.keys(), shapes.keys()
    for problem, names in (("lacks", taken - came), ("has too much:", came - taken)):
        if names:
            raise EngineError(
                f"the adapter {problem} {first_of(sorted(names))}, of {len(taken) // 2} adapted "
                "layers; trainer and engine must have the same lora.target_modules and model.path"
            )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise EngineError(
                f"{name} came with shape {list(tensor.shape)}, the engine has "
                f"{list(shapes[name])}; both must have the same lora.rank"
            )


def built_without_adapters(tensors: Collection[str]) -> EngineError:
    """Refuse an adapter for an engine without adapted layers."""
    return EngineError(
        f"an adapter of {len(tensors)} tensors came, and this engine was built without; "
        "set lora.enabled=true and lora.sync=adapter"
    )


def no_adapter_loaded() -> EngineError:
    """Refuse to sample from the frozen model alone."""
    return EngineError(
        "generate was refused: no adapter is loaded, and the frozen model alone is not the "
        "policy; sync weights first, or set lora.sync=merged"
    )
