"""LoRA of rank 32 on all linear layers of a 7B model: its sync, and what a lost base looks like."""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Cycle, Rank, Setup, largest_difference, medians
from hybridrl.errors import HybridRLError
from hybridrl.workers.sharding.managed_engine import WeightLedger

_SHAPE = "qwen2.5-7b"
_SEEN_NATS = 0.5


def run(bench: Bench, *, base: str) -> None:
    """Train once, so that B is not zero; then wake and sleep ten times."""
    with Rank(bench, _setup(base)) as rank:
        bench.record.figure("start_s", rank.start_s, "s")
        rank.step()
        first = rank.cycle()
        bench.record.figures({f"first_{n}_s": s for n, s in first.seconds.items()}, "s")
        versions = range(100, 100 + bench.size(10, dry=2))
        cycles = [_cycle_with_adapter(rank, version=version) for version in versions]
    seconds = medians(cycles)
    bench.record.figures({f"{name}_s": value for name, value in seconds.items()}, "s")
    bench.record.figures(dict(cycles[-1].num_bytes), "bytes")
    bench.record.figure("adapter_sync_s", seconds["sync"], "s")
    difference = largest_difference([first, *cycles])
    bench.record.figure("tokens_equal", float(difference != float("inf")), "yes")
    bench.record.figure("logprob_difference_nats", difference, "nats")


class BlindLedger(WeightLedger):
    """A ledger whose guard is off: it asks for no copy and enters no loss."""

    def backup_for(self, sent: Collection[str]) -> frozenset[str]:
        """Keep nothing."""
        return frozenset()

    def release(self, backup: Collection[str]) -> None:
        """Pretend that nothing is lost."""


def run_garbage(bench: Bench) -> None:
    """Lose the base once, on purpose; then let the true ledger mend it."""
    with Rank(bench, _setup("resend")) as rank:
        rank.step()
        good = rank.cycle()
        guard = rank.managed.ledger
        rank.managed.ledger = _blinded(rank)  # asleep: the base is lost, and nobody knows
        difference = _garbage(bench, rank, good)
        bench.record.figure("garbage_difference_nats", difference, "nats")
        bench.record.figure("garbage_seen", float(difference > _SEEN_NATS), "yes")
        if bench.is_dry:
            bench.record.not_exercised("that memory is lost: on a CPU it may stay as it was")
        rank.managed.ledger = guard
        _with_guard(bench, rank, good)


def _garbage(bench: Bench, rank: Rank, good: Cycle) -> float:
    """Return how far log-probs are off, in nats; infinite if the engine itself refuses them."""
    try:
        return largest_difference([good, _cycle_with_adapter(rank, version=100)])
    except HybridRLError as err:
        bench.record.note(f"sampling garbage: {type(err).__name__}: {str(err)[:400]}")
        return float("inf")


def _with_guard(bench: Bench, rank: Rank, good: Cycle) -> None:
    """The true ledger knows of the loss: the base is sent again, or nothing is sampled."""
    try:
        mended = _cycle_with_adapter(rank, version=101)
    except HybridRLError as err:
        bench.record.note(f"with the guard on: {type(err).__name__}: {str(err)[:400]}")
        bench.record.figure("refused_with_guard", 1, "yes")
        return
    difference = largest_difference([good, mended])
    bench.record.figure("mended_difference_nats", difference, "nats")
    bench.record.figure("refused_with_guard", float(difference <= _SEEN_NATS), "yes")


def _blinded(rank: Rank) -> BlindLedger:
    tensors = rank.engine.weight_memory()
    blind = BlindLedger(tensors)
    blind.receive([tensor.name for tensor in tensors])
    return blind


def _cycle_with_adapter(rank: Rank, *, version: int) -> Cycle:
    """Wake as after an optimizer step: the adapter is sent again, though it is the same."""
    rank.worker.sharding.weights_changed(version=version)
    return rank.cycle()


def _setup(base: str) -> Setup:
    return Setup(shape=_SHAPE, masters="bfloat16", memory_fraction=0.6, lora_base=base)
