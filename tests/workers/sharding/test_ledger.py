from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import LedgerError
from hybridrl.workers.rollout.buckets import stage_by_reference
from hybridrl.workers.rollout.protocol import MemoryTag, WeightMemory
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.managed_engine import WeightLedger
from tests.workers.sharding.recording import (
    BUFFER,
    WEIGHTS,
    InjectedFault,
    Journal,
    RecordingEngine,
    Rig,
    managed_engine,
)

ALL = [*WEIGHTS, BUFFER]


def _ledger() -> WeightLedger:
    sizes = WEIGHTS | {BUFFER: 3}
    return WeightLedger([WeightMemory(name, 4 * n, name == BUFFER) for name, n in sizes.items()])


def _sync(ledger: WeightLedger, names: list[str]) -> None:
    ledger.begin_sync(names)
    ledger.receive(names)


def test_a_new_engine_holds_its_buffers_and_no_trained_weights() -> None:
    ledger = _ledger()
    with pytest.raises(LedgerError, match="never sent since the engine started"):
        ledger.require_covered()
    _sync(ledger, list(WEIGHTS))
    assert ledger.is_covered
    ledger.require_covered()


def test_a_buffer_released_without_a_copy_is_refused_by_name() -> None:
    ledger = _ledger()
    _sync(ledger, list(WEIGHTS))
    for _ in range(2):
        ledger.release(backup=())
        _sync(ledger, list(WEIGHTS))
        with pytest.raises(LedgerError) as raised:
            ledger.require_covered()
        assert str(raised.value) == (
            "1 of 5 rollout tensors are not what the trainer holds: rotary.inv_freq (lost when the "
            "engine released its weights). Send them with the sync, or keep a host copy with "
            "rollout.backup_weights=ledger"
        )


def test_a_sync_that_breaks_off_is_refused_until_one_is_whole() -> None:
    ledger = _ledger()
    _sync(ledger, list(WEIGHTS))
    for _ in range(2):
        ledger.begin_sync(WEIGHTS)
        ledger.receive(["embed.weight", "layer.weight"])
        with pytest.raises(LedgerError, match=r"norm.weight, head.weight \(the last sync broke"):
            ledger.require_covered()
        ledger.begin_sync(WEIGHTS)
        ledger.receive(["head.weight"])
        assert not ledger.is_covered
        _sync(ledger, list(WEIGHTS))
        ledger.require_covered()


def test_a_tensor_that_the_engine_does_not_have_is_refused() -> None:
    ledger = _ledger()
    with pytest.raises(LedgerError, match=r"1 tensors that .* not have: lm_head.*model\.path"):
        _sync(ledger, ["embed.weight", "lm_head.weight"])


@pytest.mark.shows("1.2", "5.1")
@given(sent=st.sets(st.sampled_from(list(WEIGHTS))), is_first=st.booleans())
def test_a_host_copy_is_kept_of_exactly_what_no_sync_sends(sent: set[str], is_first: bool) -> None:
    ledger = _ledger()
    if not is_first:
        _sync(ledger, list(WEIGHTS))
    good = {BUFFER} if is_first else set(ALL)
    backup = ledger.backup_for(sent)
    assert backup == good - sent
    ledger.release(backup)
    _sync(ledger, sorted(sent))
    assert ledger.is_covered == (not is_first or sent == set(WEIGHTS))


@pytest.mark.shows("R9.4")
@given(data=st.data())
def test_covered_means_that_every_tensor_is_what_it_should_be(data: st.DataObject) -> None:
    ledger = _ledger()
    good = {BUFFER}
    names = st.sets(st.sampled_from(ALL))
    for move in data.draw(st.lists(st.sampled_from(["boot", "release", "sync", "torn"]))):
        if move == "boot":
            ledger.boot()
            good = {BUFFER}
        elif move == "release":
            backup = data.draw(names)
            ledger.release(backup)
            good &= backup
        else:
            sent = data.draw(names)
            arrived = sent if move == "sync" else sent & data.draw(names)
            ledger.begin_sync(sent)
            ledger.receive(arrived)
            good = (good - sent) | arrived
        assert ledger.is_covered == (good == set(ALL))
        assert ledger.backup_for(()) == good


@pytest.mark.shows("1.17")
def test_an_engine_without_a_copy_of_its_buffer_serves_nothing() -> None:
    """The real thing, not its book: the buffer is NaN after the release."""
    rig = Rig(num_engines=2)
    rig.cycle()
    rig.set.engines[1].ledger.backup_for = lambda sent: frozenset()  # type: ignore[method-assign]
    rig.life.wake()
    rig.life.sleep()
    for _ in range(2):
        with pytest.raises(StageError, match=f"sync failed on engine 1: .*{BUFFER}"):
            rig.life.wake()
        rig.check_training()


@pytest.mark.shows("1.1")
def test_weights_that_no_sync_sends_survive_three_sleeps() -> None:
    """As with LoRA: the base was sent once, afterwards only the last tensor is."""
    managed = managed_engine(RecordingEngine(0, Journal()))
    managed.start()
    managed.resume_weights()
    managed.ledger.begin_sync(WEIGHTS)
    managed.load(
        stage_by_reference([(name, torch.full((size,), 7.0)) for name, size in WEIGHTS.items()]), []
    )
    managed.finish_update(version=0)
    managed.sent_names = frozenset({"head.weight"})
    for version in (1, 2, 3):
        managed.release_all()
        managed.resume_weights()
        managed.ledger.begin_sync(managed.sent_names)
        managed.load(stage_by_reference([("head.weight", torch.full((5,), float(version)))]), [])
        managed.finish_update(version=version)
        engine = managed.engine
        assert isinstance(engine, RecordingEngine)
        weights = engine.memory[MemoryTag.WEIGHTS]
        assert weights["embed.weight"].tolist() == [7.0] * 6
        assert weights["head.weight"].tolist() == [float(version)] * 5


def test_a_bucket_that_the_engine_refused_is_not_entered() -> None:
    journal = Journal()
    managed = managed_engine(RecordingEngine(0, journal))
    journal.fail(0, "load", when="after")
    managed.ledger.begin_sync(WEIGHTS)
    with pytest.raises(InjectedFault):
        managed.load(stage_by_reference([("embed.weight", torch.ones(6))]), [])
    managed.load(
        stage_by_reference(
            [(name, torch.ones(n)) for name, n in WEIGHTS.items() if name[0] != "e"]
        ),
        [],
    )
    with pytest.raises(LedgerError, match=r"^1 of 5 .*embed.weight"):
        managed.finish_update(version=1)


@pytest.mark.parametrize(("call", "part"), [("release", "weights"), ("restart", "")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_release_that_fails_leaves_no_lost_weight_marked_good(
    call: str, part: str, when: str
) -> None:
    journal = Journal()
    managed = managed_engine(RecordingEngine(0, journal))
    managed.sent_names = frozenset(WEIGHTS)
    managed.load(
        stage_by_reference([(name, torch.ones(size)) for name, size in WEIGHTS.items()]), []
    )
    assert managed.ledger.is_covered
    journal.fail(0, call, part, when=when)
    with pytest.raises(InjectedFault):
        managed.release_all() if call == "release" else managed.restart()
    assert managed.ledger.backup_for(()) == {BUFFER}
