"""The weight ledger: which tensors of a rollout engine hold what the trainer meant them to hold.

Releasing memory loses tensors; a sync brings them back. Without a book, a tensor that was released
and not sent again is garbage that still samples fluent text. With it, generating on garbage is
impossible, and a host copy is kept of exactly those tensors that no sync rewrites.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hybridrl.errors import LedgerError, first_of
from hybridrl.workers.rollout.protocol import WeightMemory


class WeightLedger:
    """Bookkeeping for one rollout engine. Starts as at BOOT: weights lost, buffers good."""

    def __init__(self, tensors: Sequence[WeightMemory]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._invalid: dict[str, str] = {}
        self.boot()

    def boot(self) -> None:
        """A new engine: its weights are not the trainer's, but it computed its own buffers."""
        self._invalid = {
            name: "never sent since the engine started"
            for name, tensor in self._tensors.items()
            if not tensor.is_buffer
        }

    def backup_for(self, sent: Collection[str]) -> frozenset[str]:
        """Name the good tensors that no sync sends: they need a host copy to survive a release."""
        return frozenset(self._tensors.keys() - self._invalid.keys() - set(sent))

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the bytes of these tensors, for example the host memory that their copy takes."""
        return sum(self._tensors[name].num_bytes for name in names)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors: what a blanket host copy would take."""
        return self.bytes_of(self._tensors.keys())

    def release(self, backup: Collection[str]) -> None:
        """Weights memory was freed; only ``backup`` survives, in the state it was in."""
        for name in self._tensors.keys() - set(backup):
            self._invalid[name] = "lost when the engine released its weights"

    def begin_sync(self, names: Collection[str]) -> None:
        """A sync is about to send these: each is invalid until it has arrived."""
        for name in names:
            if name in self._tensors:
                self._invalid.setdefault(name, "the last sync broke off before it")

    def receive(self, names: Collection[str]) -> None:
        """Mark these tensors as valid: they have arrived completely.

        Raises:
            LedgerError: the engine has no tensor of that name.
        """
        unknown = [name for name in names if name not in self._tensors]
        if unknown:
            raise LedgerError(
                f"the trainer sent {len(unknown)} tensors that the rollout engine does not have: "
                f"{first_of(unknown)}; trainer and engine must load the same model.path"
            )
        for name in names:
            self._invalid.pop(name, None)

    def covers(self, names: Collection[str]) -> bool:
        """Return whether each of these tensors holds what it should."""
        return self._invalid.keys().isdisjoint(names)

    @property
    def is_covered(self) -> bool:
        """True if every tensor holds what it should."""
        return not self._invalid

    def require_covered(self) -> None:
        """Refuse to call the weights synced while a tensor is not.

        Raises:
            LedgerError: names the first tensors, why they are not valid, and the remedy.
        """
        if not self._invalid:
            return
        invalid = [name for name in self._tensors if name in self._invalid]  # in model order
        raise LedgerError(
            f"{len(invalid)} of {len(self._tensors)} rollout tensors are not what the "
            f"trainer holds: {first_of(invalid)} ({self._invalid[invalid[0]]}). "
            "Send them with the sync, or keep a host copy with rollout.backup_weights=ledger"
        )
