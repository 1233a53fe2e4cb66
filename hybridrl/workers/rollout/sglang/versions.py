"""The release of a server, and whether it runs with the arguments that it was given.

The tested releases answer alike in all that hybridrl asks (docs/versions.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache

from hybridrl.errors import EngineError

log = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.21", "0.5.23")
"""The first is the oldest accepted."""

_KEPT = (
    *("model_path", "dtype", "tp_size", "context_length", "enable_memory_saver"),
    *("enable_weights_cpu_backup", "enable_return_routed_experts", "enable_lora", "max_lora_rank"),
)
"""Arguments that the trainer relies on; SGLang may adapt others to the machine."""

Json = Mapping[str, object]


def require_known_version(server_info: Json) -> str:
    """Return the version of a server. Warns, once a process, of one that was not tested.

    Args:
        server_info: answer of ``/server_info``.

    Raises:
        EngineError: it has no version, or one older than the oldest tested.
    """
    version = server_info.get("version")
    if not isinstance(version, str) or not re.match(r"\d+\.\d+\.\d+", version):
        raise EngineError(
            f"the rollout server reports version {version!r} in /server_info, which is none of "
            "SGLang: is another program on its port?"
        )
    if _numbers(version) < _numbers(TESTED_VERSIONS[0]):
        raise EngineError(
            f"SGLang {version} is too old; {TESTED_VERSIONS[0]} is the oldest that is driven: "
            f"pip install 'sglang=={TESTED_VERSIONS[0]}'"
        )
    _warn_if_untested(version)
    return version


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
    if not is_release or _numbers(version) not in map(_numbers, TESTED_VERSIONS):
        log.warning(
            "SGLang %s is not tested with this version of hybridrl; tested are %s",
            version,
            ", ".join(TESTED_VERSIONS),
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
