"""One update by broadcast: the manager stops the engines, the rank that gathers sends to them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from hybridrl.workers.rollout.protocol import Receiver
from hybridrl.workers.sharding.control import Failures
from hybridrl.workers.sharding.weight_files import WeightCopy


@dataclass(frozen=True, slots=True)
class Sent:
    """How the rank that sends ended a transfer."""

    copy: WeightCopy | None = None
    """Of all that was sent; None: it broke off."""

    reason: str = ""
    """Why it broke off."""

    failures: Failures = field(default_factory=dict)
    """Engines by whose fault; empty: none's."""


class Transfer:
    """Where both wait for each other, in threads of the manager."""

    def __init__(self) -> None:
        self._receivers: Future[Mapping[int, Receiver]] = Future()
        self._sent: Future[Sent] = Future()

    def pass_on(self, receivers: Mapping[int, Receiver]) -> Sent:
        """Hand over engines that are ready, and wait until all is sent to them."""
        self._receivers.set_result(receivers)
        return self._sent.result()

    def receivers(self) -> Mapping[int, Receiver]:
        """Wait for the engines; raises what ended the update before."""
        return self._receivers.result()

    def end(self, sent: Sent) -> None:
        """Let the update go on. Idempotent."""
        with suppress(InvalidStateError):
            self._sent.set_result(sent)

    def note_end(self, update: Future[None]) -> None:
        """The update has ended, maybe without a transfer: nobody must wait for one."""
        with suppress(InvalidStateError):
            if (error := update.exception()) is not None:
                self._receivers.set_exception(error)
            else:
                self._receivers.set_result({})
