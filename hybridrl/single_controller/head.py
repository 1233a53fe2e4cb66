"""The head of a Ray cluster: does it answer? Asked where Ray itself would wait without a message.

Measured with Ray 2.60: `ray.init` on an address without a listener retries for minutes. When the
head of a running cluster is killed, calls on ranks of other nodes continue. After 60 s
(``RAY_gcs_rpc_server_reconnect_timeout_s``) Ray ends the driver's process from C++: no exception,
no exit handler. So the driver checks the head itself, more often than that.
"""

from __future__ import annotations

import socket
import time

import ray

from hybridrl.errors import ClusterLostError, ResourceError

PATIENCE_S = 20.0
"""Seconds of silence after which a head counts as lost; the remaining ones end the run."""

LOOK_EVERY_S = 5.0
_CONNECT_S = 2.0


def require_head(address: str) -> None:
    """Refuse an address, ``HOST:PORT`` or ``ray://HOST:PORT``, where nothing listens."""
    host_port = address.removeprefix("ray://")
    if not _answers(host_port, timeout_s=3 * _CONNECT_S):
        raise ResourceError(f"nothing listens at {host_port}")


def _answers(address: str, *, timeout_s: float = _CONNECT_S) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


class HeadMonitor:
    """Checks the head of the connected cluster while the driver waits for ranks."""

    def __init__(self) -> None:
        """Take the address of the present connection. Over ``ray://`` nothing is checked:
        Ray's client has its own deadlines.
        """
        is_client = ray.util.client.ray.is_connected()
        self.address = "" if is_client else ray.get_runtime_context().gcs_address
        self._silent_since_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the head does not answer at this moment."""
        return bool(self.address) and not _answers(self.address)

    def is_lost(self) -> bool:
        """Check once; return whether the head has been silent for ``PATIENCE_S`` seconds."""
        now_s = time.monotonic()
        if not self.is_silent:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        return self._silent_since_s is not None and now_s - self._silent_since_s >= PATIENCE_S

    def lost(self) -> ClusterLostError:
        """Return the error of a lost head."""
        return ClusterLostError(
            f"the head of the Ray cluster at {self.address} does not answer any more: it was "
            "killed, or its machine is lost; start the cluster again (`ray start --head`), then "
            "the run"
        )
