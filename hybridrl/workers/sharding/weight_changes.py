"""Changes of weights since the last update: they suffice for engines that have those before.

At the learning rates of reinforcement learning most steps are too small to move a weight by one
number of bfloat16 (arXiv:2602.03839). Values are compared, sent and written as bits in the type
that engines get. There is no arithmetic, so nothing can drift: the result is what a full update
would have brought. A checksum of each tensor says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.errors import LedgerError
from hybridrl.workers.rollout.buckets import Bucket, as_sent

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that hold the bits of a number, by its bytes."""

_GAPS, _VALUES, _CHECKSUM = "gaps", "values", "checksum"
_MAX_GAP = 2**16 - 1


class SentWeights:
    """A copy of what was sent last, on the host of the rank that sends."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Have sent nothing; floats are sent in ``dtype``."""
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether all changes so far are less than all weights, which engines that come later get.

        False as long as nothing was sent.
        """
        return self._num_bytes < 2 * sum(tensor.nbytes for tensor in self._tensors.values())

    def changes(self, bucket: Bucket) -> Bucket:
        """Return the changes since a bucket was sent last; it counts as sent from here on.

        A tensor of which about half has changed, or which was never sent, is returned in full, and
        one without a change is not. Of any other come three tensors on the host, as NAME#PART: gaps
        between positions [n], new values as bits [n], and a checksum of the full tensor [].
        """
        changed: list[tuple[str, Tensor]] = []
        for name, tensor in bucket:
            new = as_sent(tensor, self._dtype).to("cpu", copy=True).contiguous()
            last = self._tensors.setdefault(name, new)
            parts = [] if last is new else _difference(last, new)
            if last is new or sum(part.nbytes for _, part in parts) >= new.nbytes:
                parts = [("", new)]
            self._num_bytes += sum(values.nbytes for _, values in parts)
            changed += [(f"{name}#{part}" if part else name, values) for part, values in parts]
        return changed


def _difference(last: Tensor, new: Tensor) -> list[tuple[str, Tensor]]:
    """Return the parts that make ``new`` out of ``last``, and write them into ``last``."""
    old_bits, bits = _bits_of(last), _bits_of(new)
    positions = (old_bits != bits).nonzero().view(-1)
    if not len(positions):
        return []
    values = old_bits[positions] = bits[positions]
    gaps = positions.diff(prepend=positions.new_zeros(1))
    if int(gaps.max()) <= _MAX_GAP:
        gaps = gaps.to(torch.uint16)
    return [(_GAPS, gaps), (_VALUES, values), (_CHECKSUM, _checksum_of(last))]


class KeptWeights:
    """The weights of an engine on the host of its process, for changes to be written into."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._chain = ""
        self._length = 0

    def missing(self, chain: str, length: int) -> range:
        """Return which of the ``length`` parts of a chain are to be written, in their order.

        All of them, unless these weights are of the same chain: changes fit on nothing else.
        """
        is_behind = self._chain == chain and self._length <= length
        if not is_behind:
            self.tensors = {}
        self._chain = ""  # until all are written
        return range(self._length if is_behind else 0, length)

    def write(self, bucket: Bucket) -> None:
        """Write tensors or changes; LedgerError if the result is not what was sent."""
        parts = dict(bucket)
        for key, tensor in bucket:
            name, _, part = key.partition("#")
            if not part:
                self.tensors[name] = tensor.clone()  # what comes by Ray can only be read
            elif part == _GAPS:
                kept = self.tensors[name]
                positions = tensor.to(torch.int64).cumsum(0)
                _bits_of(kept)[positions] = parts[f"{name}#{_VALUES}"]
                if not torch.equal(_checksum_of(kept), parts[f"{name}#{_CHECKSUM}"]):
                    raise LedgerError(
                        f"{name}: the changes of an update do not make the weights of the trainer "
                        "out of those that this engine had; set serving.weight_deltas=false"
                    )

    def note_written(self, chain: str, length: int) -> None:
        """All parts of the chain up to ``length`` are written."""
        self._chain, self._length = chain, length


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(_BITS[tensor.itemsize])


def _checksum_of(tensor: Tensor) -> Tensor:
    """Add up the words of 64 bits, at the speed of memory; zlib's sums take 20 times as long."""
    data = _bits_of(tensor).view(torch.uint8)
    end = len(data) // 8 * 8
    return data[:end].view(torch.int64).sum() + data[end:].sum()
