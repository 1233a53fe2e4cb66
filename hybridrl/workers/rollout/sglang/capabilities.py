"""Capabilities of an SGLang server, read once at its start from its own answers.

Releases of SGLang differ in the functions of an RL loop. Routes are read from ``/openapi.json``.
Behaviour that no answer shows follows from the version, as read in the sources of the tested
releases and seen on running servers (docs/versions.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang.arguments import ServerSpec

log = logging.getLogger(__name__)

OPENAPI_ROUTE = "/openapi.json"
"""Route of a server's list of routes; 404 if it was started with ``DISABLE_OPENAPI_DOC``."""

TESTED_VERSIONS = ("0.5.17", "0.5.21", "0.5.23")
"""Releases that the table of behaviours was read from; the first is the oldest accepted."""

PAUSE_MODE = "abort"
"""Mode of ``/pause_generation`` that ends all requests: with other modes some stay, and the
server asserts that there are none when its memory is released."""

_KEPT = (
    *("model_path", "dtype", "tp_size", "context_length", "enable_memory_saver"),
    *("enable_weights_cpu_backup", "enable_return_routed_experts", "enable_lora", "max_lora_rank"),
)
"""Arguments that the trainer relies on; SGLang may adapt others to the machine."""

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Need:
    """One capability and its evidence; ``what`` completes "SGLang X cannot ..."."""

    what: str
    since: str = TESTED_VERSIONS[0]
    route: str = ""
    switch: str = ""


class Capability(Enum):
    """Capabilities that the trainer may need of a server."""

    UPDATE_FROM_TENSOR = _Need("take weights from tensors", route="/update_weights_from_tensor")
    UPDATE_FROM_DISTRIBUTED = _Need(
        "take weights from a broadcast group", route="/update_weights_from_distributed"
    )
    UPDATE_FROM_DISK = _Need("take weights from disk", route="/update_weights_from_disk")
    UPDATE_SESSION = _Need(
        "bracket a weight update with begin_weight_update and end_weight_update",
        since="0.5.21",
        route="/begin_weight_update",
    )
    """Where it exists it is mandatory: an update without it is answered with 400."""

    CHECK_WEIGHTS = _Need("compare its weights", route="/weights_checker")
    PAUSE = _Need("pause generation", route="/pause_generation")
    RELEASE_MEMORY = _Need("release and resume memory", route="/release_memory_occupation")
    FREE_MEMORY = _Need("free what it releases", switch="enable_memory_saver")
    """Off, release answers 200 and frees nothing."""

    BACK_UP_WEIGHTS = _Need(
        "keep weights in host memory while released", switch="enable_weights_cpu_backup"
    )
    KEEP_CUDA_GRAPHS = _Need(
        "keep captured CUDA graphs intact while their memory is released", since="0.5.21"
    )
    """Older ones drop what replays read from the graph pool: leave the cuda_graph tag alone."""

    ADAPTER_FROM_TENSORS = _Need(
        "load a LoRA adapter from tensors",
        route="/load_lora_adapter_from_tensors",
        switch="enable_lora",
    )
    ROUTED_EXPERTS = _Need("return routed experts", switch="enable_return_routed_experts")
    """Off, the request is answered without the field and without an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapabilities:
    """One server's version and what it can do; built by ``read_capabilities``."""

    version: str
    """As the server spells it, for example ``0.5.21`` or ``0.5.22.dev3+gabc``."""

    available: frozenset[Capability]
    routes: frozenset[str]
    """Paths it serves; empty if it hides them."""

    pause_modes: tuple[str, ...]
    """Modes of ``/pause_generation``."""

    def can(self, capability: Capability) -> bool:
        """Whether ``require`` would pass."""
        return capability in self.available

    def require(self, capability: Capability) -> None:
        """Raise if the server lacks a capability.

        Raises:
            EngineError: one sentence with the capability, the server's version, and the version
                or the argument that provides it.
        """
        if capability in self.available:
            return
        need: _Need = capability.value
        if _numbers(self.version) < _numbers(need.since):
            raise EngineError(
                f"SGLang {self.version} cannot {need.what}; SGLang {need.since} and newer can: "
                f"pip install 'sglang>={need.since}'"
            )
        if need.route and self.routes and need.route not in self.routes:
            raise EngineError(
                f"this build of SGLang {self.version} cannot {need.what}: it does not serve "
                f"{need.route}, which the release {need.since} does: pip install "
                f"'sglang=={_nearest_tested(self.version)}'"
            )
        raise EngineError(
            f"SGLang {self.version} cannot {need.what} because it was started without "
            f"{need.switch}: set rollout.engine_args.{need.switch}=true"
        )

    def require_for(self, spec: ServerSpec) -> None:
        """Require the capabilities of its life cycle and its requests; see ``require``."""
        rollout = spec.rollout
        sleeps_on_gpu = rollout.sleep and spec.device == "cuda"
        verifies = rollout.verify_weights != "never"
        needed = {
            Capability.UPDATE_FROM_TENSOR: not (spec.by_broadcast or spec.from_disk),
            Capability.UPDATE_FROM_DISTRIBUTED: spec.by_broadcast,
            Capability.UPDATE_FROM_DISK: spec.from_disk or verifies,
            Capability.CHECK_WEIGHTS: verifies,
            Capability.PAUSE: True,
            Capability.RELEASE_MEMORY: rollout.sleep,
            Capability.FREE_MEMORY: sleeps_on_gpu,
            Capability.BACK_UP_WEIGHTS: sleeps_on_gpu and spec.keeps_backup,
            Capability.ADAPTER_FROM_TENSORS: spec.lora is not None,
            Capability.ROUTED_EXPERTS: rollout.routed_experts,
        }
        for capability, is_needed in needed.items():
            if is_needed:
                self.require(capability)
        if PAUSE_MODE not in self.pause_modes:
            raise EngineError(
                f"SGLang {self.version} has no pause mode {PAUSE_MODE!r}; it has "
                f"{', '.join(self.pause_modes)}"
            )

    def require_same_version(self, server_info: Json) -> None:
        """Refuse a restarted server of another version.

        Raises:
            EngineError: names both versions.
        """
        version = _version_of(server_info)
        if version != self.version:
            raise EngineError(
                f"the rollout server now is SGLang {version}, but what it can do was read from "
                f"SGLang {self.version}: restart the run, so that it is read again"
            )


def read_capabilities(server_info: Json, openapi: Json | None) -> ServerCapabilities:
    """Read what a server can do, once at its start. Warns, once a process, of an untested version.

    Args:
        server_info: answer of ``/server_info``.
        openapi: answer of ``OPENAPI_ROUTE``; None if the server hides it: routes and modes are then
            assumed to be those of its version.

    Raises:
        EngineError: no version in ``server_info``, or one older than the oldest tested.
    """
    version = _version_of(server_info)
    if _numbers(version) < _numbers(TESTED_VERSIONS[0]):
        raise EngineError(
            f"SGLang {version} is too old; {TESTED_VERSIONS[0]} is the oldest that is driven: "
            f"pip install 'sglang=={TESTED_VERSIONS[1]}'"
        )
    _warn_if_untested(version)
    routes = frozenset(_at(openapi, "paths"))

    def is_available(need: _Need) -> bool:
        if need.switch and server_info.get(need.switch) is not True:
            return False
        if need.route and routes:
            return need.route in routes
        return _numbers(version) >= _numbers(need.since)

    pause = _at(openapi, "components", "schemas", "PauseGenerationReqInput", "properties", "mode")
    modes = pause.get("enum")
    return ServerCapabilities(
        version=version,
        available=frozenset(each for each in Capability if is_available(each.value)),
        routes=routes,
        # Hidden modes are those of all tested versions.
        pause_modes=tuple(modes) if isinstance(modes, list) else ("abort", "retract", "in_place"),
    )


def require_as_asked(arguments: Json, info: Json) -> None:
    """Refuse a server that runs with other arguments than it was given.

    Args:
        info: the server's answer to ``/server_info``.

    Raises:
        EngineError: each differing argument, with the requested and the effective value.
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


@cache
def _warn_if_untested(version: str) -> None:
    is_release = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?(\+.*)?", version) is not None
    if is_release and _numbers(version) in map(_numbers, TESTED_VERSIONS):
        return
    log.warning(
        "SGLang %s is not tested with this version of hybridrl; tested are %s. Its behaviour is "
        "taken to be that of %s.",
        version,
        ", ".join(TESTED_VERSIONS),
        _nearest_tested(version),
    )


def _nearest_tested(version: str) -> str:
    numbers = _numbers(version)
    return max((tested for tested in TESTED_VERSIONS if _numbers(tested) <= numbers), key=_numbers)


def _version_of(server_info: Json) -> str:
    version = server_info.get("version")
    if not isinstance(version, str) or not re.match(r"\d+\.\d+\.\d+", version):
        raise EngineError(
            f"the rollout server reports version {version!r} in /server_info, which is none of "
            "SGLang: is another program on its port?"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _at(document: object, *keys: str) -> Json:
    """Walk down nested objects; an empty one where the path ends early."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}
