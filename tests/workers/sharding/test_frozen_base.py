"""All ranks take the same way for frozen weights, from what each of them measured."""

from __future__ import annotations

import logging

import pytest

from hybridrl.planning.frozen_base import BasePlan
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.frozen_base import resolve_lora_base
from tests.ranks import run_ranks
from tests.workers.train.engines import CPU
from tests.workers.train.lora_engines import with_lora


def _settled(rank: int, plan: BasePlan | None, base: str) -> str:
    lora = with_lora(base=base)
    control = ControlGroup(timeout_s=30.0)
    return resolve_lora_base(
        lora, plan=plan, device=CPU, control=control, num_ranks_per_node=2
    ).base


@pytest.mark.parametrize("base", ["resident", "backup", "resend"])
def test_what_was_asked_for_stays(base: str) -> None:
    assert _settled(0, None, base) == base


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _settled(0, None, "auto") == "resident"
    assert "lora.base=auto: resident, because" in caplog.text


def test_two_ranks_measure_and_agree() -> None:
    """A CPU has no free device memory, so nothing fits; the host has room for 1 MiB, not for 1 EiB.

    Whether a copy or the stream is quicker is the machine's matter; that both agree is ours.
    """
    one, other = run_ranks(2, _settled, BasePlan(base_bytes=2**20, peak_bytes=2**30), "auto")
    assert one == other in ("backup", "resend")
    short = run_ranks(2, _settled, BasePlan(base_bytes=2**60, peak_bytes=2**61), "auto")
    assert short == ["resend", "resend"]
