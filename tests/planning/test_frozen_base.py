"""Where frozen weights wait: on the device if they fit, else where the quicker copy is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridrl.planning.frozen_base import (
    BasePlan,
    RankFacts,
    base_plan,
    choose_base,
    has_choice,
)
from hybridrl.planning.plan import MemoryItem, MemoryPlan, Phase
from tests.config.values import config_of

GIB = 2**30
PLAN = BasePlan(base_bytes=16 * GIB, peak_bytes=70 * GIB)
RANK = RankFacts(
    free_device_bytes=80 * GIB,
    free_host_bytes=100 * GIB,
    host_bytes_per_s=50e9,
    resend_bytes_per_s=1000e9,
)
SHORT = replace(RANK, free_device_bytes=76 * GIB)


@pytest.mark.parametrize(
    ("ranks", "base", "words"),
    [
        ([RANK], "resident", "needs 77.0 GiB with it, 80.0 GiB are free"),
        ([RANK, SHORT], "resend", "76.0 GiB are free; to the host and back takes 0.69 s"),
        ([replace(SHORT, resend_bytes_per_s=10e9)], "backup", "again 1.72 s a step"),
        ([SHORT, replace(SHORT, resend_bytes_per_s=10e9)], "backup", "again 1.72 s a step"),
        (
            [replace(SHORT, resend_bytes_per_s=10e9, free_host_bytes=18 * GIB)],
            "resend",
            "the host has 18.0 GiB for 16.0 GiB",
        ),
    ],
)
def test_the_rank_that_has_least_decides_and_the_numbers_are_told(
    ranks: list[RankFacts], base: str, words: str
) -> None:
    found, why = choose_base(PLAN, ranks)
    assert found == base
    assert words in why


def test_without_a_device_of_its_own_memory_stays_where_it_is() -> None:
    assert choose_base(None, [])[0] == "resident"


GPU = ("cluster=one_gpu", "actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16")
AUTO = ("lora=default", "lora.base=auto", "rollout.sleep=true")


@pytest.mark.parametrize(
    "overrides",
    [
        AUTO,  # on a CPU
        (*GPU, "lora=default", "lora.base=auto", "rollout.sleep=false"),
        (*GPU, "lora=default", "rollout.sleep=true"),
        (*GPU, "rollout.sleep=true"),
    ],
)
def test_there_is_no_choice_where_memory_does_not_decide(overrides: tuple[str, ...]) -> None:
    assert not has_choice(config_of(*overrides))
    assert has_choice(config_of(*GPU, *AUTO))


def test_the_plan_is_that_of_training_with_resident_weights() -> None:
    weights = MemoryItem("rollout weights", 2 * GIB)
    phases = (
        Phase("generate", (weights, MemoryItem("KV cache", 60 * GIB))),
        Phase("logprobs", (weights, MemoryItem("logits", 7 * GIB))),
        Phase("update", (weights, MemoryItem("gradients", 9 * GIB))),
    )
    plan = base_plan(MemoryPlan("cuda", phases))
    assert plan == BasePlan(base_bytes=2 * GIB, peak_bytes=11 * GIB)
