"""What an SGLang server can do, read once at its start from its own answers.

Releases of SGLang differ where an RL loop touches them: routes appear, an idle check loosens, a
refused flush stops killing the server. What a server shows in ``/openapi.json`` is read from there;
behaviour that no answer shows goes by version, as read in the sources of the tested releases and
seen on running servers (docs/sglang-versions.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from hybridrl.errors import EngineError

log = logging.getLogger(__name__)

SERVER_INFO_ROUTES = ("/server_info", "/get_server_info")
"""Where a server tells its version and arguments; the second is the older name, still served."""

OPENAPI_ROUTE = "/openapi.json"
"""Where a server tells its routes; 404 if it was started with ``DISABLE_OPENAPI_DOC``."""

TESTED_VERSIONS = ("0.5.17", "0.5.21", "0.5.23")
"""Releases that the table of behaviours was read from; the first is the oldest accepted."""

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
"""Tags of release and resume, the same in all tested versions."""

CHECKER_ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")
"""Actions of ``/weights_checker``, the same in all tested versions.

From 0.5.21 on ``compare`` throws its snapshot away: one snapshot serves one comparison.
"""

Json = Mapping[str, object]
_Numbers = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What one capability is and where it shows; ``what`` completes "SGLang X cannot ..."."""

    what: str
    since: str = TESTED_VERSIONS[0]
    route: str = ""
    switch: str = ""


class Capability(Enum):
    """What a caller may ask of a server with ``ServerCapabilities.require``."""

    UPDATE_FROM_TENSOR = _Need(
        what="take weights from tensors", route="/update_weights_from_tensor"
    )
    UPDATE_FROM_DISTRIBUTED = _Need(
        what="take weights from a broadcast group", route="/update_weights_from_distributed"
    )
    UPDATE_FROM_DISK = _Need(what="take weights from disk", route="/update_weights_from_disk")
    UPDATE_SESSION = _Need(
        what="bracket a weight update with begin_weight_update and end_weight_update",
        since="0.5.21",
        route="/begin_weight_update",
    )
    """Where it exists it is mandatory: an update outside of it is answered with 400."""

    PAUSE = _Need(what="pause generation", route="/pause_generation")
    RELEASE_MEMORY = _Need(what="release and resume memory", route="/release_memory_occupation")
    CHECK_WEIGHTS = _Need(what="hash its weights", route="/weights_checker")
    LOADS = _Need(what="tell its running and queued requests", route="/v1/loads")
    """A published snapshot: stale while paused, so it proves no drain. A flush does."""

    READY_ROUTE = _Need(what="answer on /ready", since="0.5.21", route="/ready")
    IDLE_WHILE_RETRACTED = _Need(
        what="flush or release while retracted requests wait", since="0.5.21"
    )
    """Without it flush answers 400 and release kills the server until the queue is empty too."""

    REFUSE_FLUSH_ALIVE = _Need(
        what="survive a weight update with flush_cache=true while requests run", since="0.5.23"
    )
    """Without it an assertion in the scheduler ends the server."""

    VERSION_PER_TOKEN = _Need(
        what="tell the weight version of each token (meta_info.weight_versions)", since="0.5.21"
    )
    """Without it an answer names only the version at its end, whatever produced its tokens."""

    KEEP_CUDA_GRAPHS = _Need(
        what="keep captured CUDA graphs intact while their memory is released", since="0.5.21"
    )
    """Older ones drop what replays read from the graph pool: leave the cuda_graph tag alone."""

    NAME_BAD_SAMPLING_KEY = _Need(
        what="name an unknown sampling parameter (it answers 500 without a word)", since="0.5.23"
    )
    ADAPTER_FROM_TENSORS = _Need(
        what="load a LoRA adapter from tensors",
        route="/load_lora_adapter_from_tensors",
        switch="enable_lora",
    )
    ROUTED_EXPERTS = _Need(what="return routed experts", switch="enable_return_routed_experts")
    """Off, the request is answered without the field and without an error."""

    SEEDS = _Need(what="follow a request's sampling_seed", switch="enable_deterministic_inference")
    """Off, sampling_seed is accepted and ignored."""

    FREE_MEMORY = _Need(what="free what it releases", switch="enable_memory_saver")
    """Off, release answers 200 and frees nothing."""

    BACK_UP_WEIGHTS = _Need(
        what="keep weights in host memory while released", switch="enable_weights_cpu_backup"
    )

    @property
    def need(self) -> _Need:
        """Where this capability shows."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapabilities:
    """One server's version and what it can do; built by ``read_capabilities``."""

    version: str
    """As the server spells it, for example ``0.5.21`` or ``0.5.22.dev3+gabc``."""

    is_tested: bool
    """Whether it is one of ``TESTED_VERSIONS`` (a post release of one counts as it)."""

    available: frozenset[Capability]
    """All that ``require`` lets pass."""

    routes: frozenset[str]
    """Paths it serves; empty if it hides them."""

    pause_modes: tuple[str, ...]
    """Modes of ``/pause_generation``; ``abort`` ends all requests, the others keep them."""

    default_pause_mode: str
    """What a pause without a mode does."""

    flush_waits: bool
    """Whether ``/flush_cache?timeout=S`` waits up to S seconds for an idle engine."""

    draft_field: str
    """Field of a tensor update that spares draft models: ``selector``, ``disable_draft_model``."""

    switches: frozenset[str]
    """Boolean server arguments that are on, such as ``enable_lora``."""

    def can(self, capability: Capability) -> bool:
        """Whether ``require`` would pass."""
        return capability in self.available

    def require(self, capability: Capability) -> None:
        """Refuse to go on without a capability.

        Raises:
            EngineError: one sentence with what is asked for, the server's version, and the version
                or the argument that gives it.
        """
        if capability in self.available:
            return
        need = capability.need
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

    def require_pause_mode(self, mode: str) -> None:
        """Refuse a pause mode that the server does not have.

        Raises:
            EngineError: names the mode and those that there are.
        """
        if mode not in self.pause_modes:
            raise EngineError(
                f"SGLang {self.version} has no pause mode {mode!r}; it has "
                f"{', '.join(self.pause_modes)}"
            )

    def require_same_version(self, server_info: Json) -> None:
        """Refuse a server, restarted or behind the same address, of another version.

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
    """Read what a server can do. Call it once, at its start: nothing of it changes later.

    Warns, once per version and process, of a version that is not tested.

    Args:
        server_info: answer of ``SERVER_INFO_ROUTES``.
        openapi: answer of ``OPENAPI_ROUTE``; None if the server hides it, and routes and modes are
            then taken to be those of its version.

    Raises:
        EngineError: no version in ``server_info``, or one older than the oldest tested.
    """
    version = _version_of(server_info)
    numbers = _numbers(version)
    if numbers < _numbers(TESTED_VERSIONS[0]):
        raise EngineError(
            f"SGLang {version} is too old; {TESTED_VERSIONS[0]} is the oldest that is driven: "
            f"pip install 'sglang=={TESTED_VERSIONS[1]}'"
        )
    is_release = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?(\+.*)?", version) is not None
    is_tested = is_release and numbers in map(_numbers, TESTED_VERSIONS)
    if not is_tested:
        _warn_untested(version)
    routes = frozenset(_at(openapi, "paths"))
    switches = frozenset(name for name, value in server_info.items() if value is True)
    modes, default_mode = _pause_modes(openapi)
    return ServerCapabilities(
        version=version,
        is_tested=is_tested,
        available=frozenset(
            capability
            for capability in Capability
            if _is_available(capability.need, numbers=numbers, routes=routes, switches=switches)
        ),
        routes=routes,
        pause_modes=modes,
        default_pause_mode=default_mode,
        flush_waits=not routes or _flush_has_timeout(openapi),
        draft_field=_draft_field(openapi, numbers),
        switches=switches,
    )


def _is_available(
    need: _Need, *, numbers: _Numbers, routes: frozenset[str], switches: frozenset[str]
) -> bool:
    if need.switch and need.switch not in switches:
        return False
    if need.route and routes:
        return need.route in routes
    return numbers >= _numbers(need.since)


@cache
def _warn_untested(version: str) -> None:
    log.warning(
        "SGLang %s is not tested with this version of hybridrl; tested are %s. Its behaviour is "
        "taken to be that of %s.",
        version,
        ", ".join(TESTED_VERSIONS),
        _nearest_tested(version),
    )


def _nearest_tested(version: str) -> str:
    """Return the newest tested release that is not newer than ``version``."""
    numbers = _numbers(version)
    return max((tested for tested in TESTED_VERSIONS if _numbers(tested) <= numbers), key=_numbers)


def _version_of(server_info: Json) -> str:
    version = server_info.get("version")
    if not isinstance(version, str) or not re.match(r"\d+\.\d+\.\d+", version):
        raise EngineError(
            f"the rollout server tells version {version!r} in {SERVER_INFO_ROUTES[0]}, which is "
            "none of SGLang: is another program on its port?"
        )
    return version


def _numbers(version: str) -> _Numbers:
    major, minor, patch = re.findall(r"\d+", version)[:3]
    return int(major), int(minor), int(patch)


def _at(document: object, *keys: str) -> Json:
    """Walk down nested objects; an empty one where the path ends early."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}


def _properties(openapi: Json | None, schema: str) -> Json:
    return _at(openapi, "components", "schemas", schema, "properties")


def _pause_modes(openapi: Json | None) -> tuple[tuple[str, ...], str]:
    mode = _at(_properties(openapi, "PauseGenerationReqInput"), "mode")
    names = mode.get("enum")
    if not isinstance(names, list):  # hidden: as in all tested versions
        return ("abort", "retract", "in_place"), "abort"
    return tuple(map(str, names)), str(mode.get("default", names[0]))


def _flush_has_timeout(openapi: Json | None) -> bool:
    parameters = _at(openapi, "paths", "/flush_cache", "post").get("parameters")
    return isinstance(parameters, list) and any(
        _at(parameter).get("name") == "timeout" for parameter in parameters
    )


def _draft_field(openapi: Json | None, numbers: _Numbers) -> str:
    fields = _properties(openapi, "UpdateWeightsFromTensorReqInput")
    if fields:
        return "selector" if "selector" in fields else "disable_draft_model"
    return "selector" if numbers >= _numbers("0.5.21") else "disable_draft_model"
