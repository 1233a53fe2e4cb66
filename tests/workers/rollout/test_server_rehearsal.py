"""Under which key a refusal of SGLang is told; tests/sglang has the refusals themselves."""

from __future__ import annotations

import pytest

from hybridrl.workers.rollout.sglang.rehearsal import violation_of

ARGUMENTS: dict[str, object] = {
    "mem_fraction_static": 0.9,
    "context_length": 70,
    "page_size": 7,
    "chunked_prefill_size": 100,
    "enable_weights_cpu_backup": True,
}


@pytest.mark.parametrize(
    ("names", "key", "remedies"),
    [
        (["mem_fraction_static"], "rollout.memory_fraction", ()),
        (["context_length"], "data.max_prompt_tokens", ()),
        (["enable_weights_cpu_backup"], "rollout.backup_weights", ()),
        (["page_size"], "rollout.engine_args.page_size", (("~rollout.engine_args.page_size",),)),
        (
            ["page_size", "chunked_prefill_size"],
            "rollout.engine_args.page_size",
            (("~rollout.engine_args.page_size", "~rollout.engine_args.chunked_prefill_size"),),
        ),
        ([], "rollout.engine", ()),
    ],
)
def test_a_refusal_is_told_under_the_key_that_the_argument_comes_from(
    names: list[str], key: str, remedies: tuple[tuple[str, ...], ...]
) -> None:
    refusal = {"names": names, "reason": "AssertionError: it does not divide", "fix": ""}
    violation = violation_of(refusal, ARGUMENTS, "0.5.21")
    assert (violation.key, violation.remedies) == (key, remedies)
    assert "SGLang 0.5.21 refuses it: AssertionError: it does not divide" in str(violation)
    assert "Fix: " in str(violation)
