"""What the trainer relies on and a server must honour, checked once when it has started."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang.arguments import ServerSpec
from hybridrl.workers.rollout.sglang.capabilities import Capability, ServerCapabilities

_KEPT = (
    *("model_path", "dtype", "tp_size", "context_length", "enable_memory_saver"),
    *("enable_weights_cpu_backup", "enable_return_routed_experts", "enable_lora", "max_lora_rank"),
)
"""Arguments that the trainer relies on; others SGLang may adapt to the machine."""

PAUSE_MODE = "abort"
"""Of ``/pause_generation``, which ends all requests: under the others some stay, and the server
asserts that there are none when its memory is released."""


def require_as_asked(arguments: Mapping[str, object], info: Mapping[str, object]) -> None:
    """Refuse a server that runs with other arguments than it was given.

    Args:
        arguments: of ``build_arguments``.
        info: the server's answer to ``/server_info``.

    Raises:
        EngineError: each differing argument, with what was asked for and what is in effect.
    """
    differing = [
        f"{name}={info[name]!r} instead of {arguments[name]!r}"
        for name in _KEPT
        if name in arguments and name in info and info[name] != arguments[name]
    ]
    if differing:
        raise EngineError(
            f"SGLang does not run as it was started: {', '.join(differing)}; it changes what the "
            "model or the device cannot do: see its log, and ask for what it can"
        )


def require_able(capabilities: ServerCapabilities, spec: ServerSpec) -> None:
    """Refuse a server that cannot do what its life cycle and its requests will ask of it.

    Raises:
        EngineError: what it cannot do, and the version or the argument that can.
    """
    sleeps_on_gpu = spec.rollout.sleep and spec.device == "cuda"
    needed = {
        Capability.UPDATE_FROM_TENSOR: True,
        Capability.PAUSE: True,
        Capability.RELEASE_MEMORY: spec.rollout.sleep,
        Capability.FREE_MEMORY: sleeps_on_gpu,
        Capability.BACK_UP_WEIGHTS: sleeps_on_gpu and spec.keeps_backup,
        Capability.ADAPTER_FROM_TENSORS: spec.lora is not None,
        Capability.ROUTED_EXPERTS: spec.rollout.routed_experts,
    }
    for capability, is_needed in needed.items():
        if is_needed:
            capabilities.require(capability)
    capabilities.require_pause_mode(PAUSE_MODE)
