"""The control calls that a rollout engine makes to one SGLang server, started here or elsewhere.

The life cycle decides when a call is legal. This file holds the form of each call, its time limit,
and the text of a refusal.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.protocol import LEAST_WAIT_S, left_s
from hybridrl.workers.rollout.sglang.client import PROBE_TIMEOUT_S, ControlClient, RefusedError

log = logging.getLogger(__name__)

Body = dict[str, Any]

_FLUSH_WAIT_S = 1.0

_PAUSE_MODE = "abort"
"""That ends all requests: with other modes of ``/pause_generation`` some stay, and the server
asserts that there are none when its memory is released."""


class ControlCalls:
    """A server that answers, and its control calls."""

    client: ControlClient

    info: Body
    """Its arguments when it answered first, and more; see ``server_info``."""

    start_s: float
    """Seconds until it answered."""

    num_ranks: int
    """Processes that share its model."""

    _timeout_s: float
    """Of one call (``rollout.stage_timeout_s``)."""

    _start_timeout_s: float
    """Of a load of all weights from files, as in a start (``rollout.start_timeout_s``)."""

    def has_died(self) -> bool:
        """Whether it is gone, as far as is known."""
        raise NotImplementedError

    def require_alive(self, what: str) -> None:
        """Raise if it is gone.

        Raises:
            ServerDiedError: names ``what`` was asked, and why nobody answers.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Use it no more. Idempotent."""
        raise NotImplementedError

    # -- names of its weights --------------------------------------------------------------------

    def version_name(self, version: int) -> str:
        """Return the server's name of the weights of a policy version."""
        return str(version)

    def begin_update(self) -> None:
        """Weights are about to be sent. Idempotent until ``finish_update``."""

    def finish_update(self, version: int) -> None:
        """Stamp all later responses with a version: all weights were loaded."""
        self.post(
            "/update_weight_version",
            new_version=self.version_name(version),
            abort_all_requests=False,
        )

    # -- control calls ---------------------------------------------------------------------------

    def server_info(self) -> Body:
        """Return arguments in effect, version and internal state."""
        info: Body = self.client.call("/server_info", timeout_s=PROBE_TIMEOUT_S, method="GET")
        return info

    def post(self, path: str, **body: object) -> Any:  # noqa: ANN401 - as ControlClient.call
        """Do one control call within ``rollout.stage_timeout_s``, and the time left of its stage.

        Raises:
            EngineError: it was refused, or the server is gone.
            DeadlineError: it was not answered.
        """
        return self.client.call(path, body, timeout_s=left_s(self._timeout_s))

    def require_success(self, path: str, **body: object) -> Body:
        """Do one control call as ``post``, whose answer contains its own success."""
        return self.client.run(self.client.succeed(path, body, timeout_s=left_s(self._timeout_s)))

    def load_folder(self, folder: Path, *, load_format: str) -> None:
        """Load all weights of a folder, within ``rollout.start_timeout_s``.

        Fails as ``require_success`` does.
        """
        body = {"model_path": str(folder), "load_format": load_format, "flush_cache": False}
        timeout_s = left_s(self._start_timeout_s)
        self.client.run(self.client.succeed("/update_weights_from_disk", body, timeout_s=timeout_s))

    def hold(self, *, timeout_s: float) -> None:
        """Admit no request, and verify that none runs and no cache of old weights is left.

        Requests that still run are cut off, whatever their sender, also those kept by the pause of
        another client.

        Raises:
            DeadlineError: it is still busy at the deadline; how many run and wait.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._empty(deadline)
            except (RefusedError, DeadlineError) as error:
                log.info("SGLang is still busy: %s", error)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"SGLang is still busy {timeout_s:g} s after its requests were aborted "
                        f"({self.load()}), so its memory cannot be released: {error}"
                    ) from error
                self.post("/continue_generation")  # paused requests cannot end
            else:
                return

    def _empty(self, deadline: float) -> None:
        """Abort all, stop admission, and let the server itself verify that it is idle.

        In this order because ``/pause_generation`` looks only once a second whether all requests
        have ended (0.5.21 to 0.5.23); on an idle server it returns at once.
        """

        def until_deadline_s() -> float:
            return max(LEAST_WAIT_S, deadline - time.monotonic())

        self.client.call("/abort_request", {"abort_all": True}, timeout_s=until_deadline_s())
        wait_s = min(_FLUSH_WAIT_S, until_deadline_s())
        path = f"/flush_cache?timeout={wait_s:.2f}"
        self.client.call(path, timeout_s=wait_s + until_deadline_s())
        self.client.call("/pause_generation", {"mode": _PAUSE_MODE}, timeout_s=until_deadline_s())
        # Again: a request may have arrived before the admission stopped.
        self.client.call("/flush_cache", timeout_s=until_deadline_s())

    def load(self) -> str:
        """Describe how many requests run and wait, for a message: figures may be seconds old."""
        try:
            loads = self.client.run(self.client.loads())
        except (EngineError, DeadlineError) as error:
            return f"it does not say how many requests run: {error}"
        return ", ".join(
            f"{load.get('num_running_reqs')} requests running and "
            f"{load.get('num_waiting_reqs')} waiting"
            for load in loads
        )

    def progress(self) -> object:
        """Return its loads with their times, which a paused or hung server does not change."""
        return self.client.run(self.client.loads())
