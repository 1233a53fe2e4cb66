from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import load_by_name
from hybridrl.algorithms.rollout_correction import SamplerCorrection, importance
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.algorithm import read_rejections
from hybridrl.config.functions.parts import ROLLOUT_CORRECTION
from tests.algorithms.packed import make_packed, shared_rows
from tests.ranks import run_ranks

ROWS = TokenRows.on_one_rank(torch.tensor([0, 0, 0, 2]), 3)
RATIOS = [2.0, 0.5, 3.0, 0.25]  # responses: product 3 and 0.25, geometric mean 3^(1/3) and 0.25


def correct(
    ratios: list[float] = RATIOS, part: Callable[..., Any] = importance, **numbers: Any
) -> SamplerCorrection:
    sampler_T = torch.full((len(ratios),), -1.0)
    old_T = (sampler_T + torch.tensor(ratios).log()).requires_grad_()
    inputs = {"old_logprobs_T": old_T, "sampler_logprobs_T": sampler_T, "rows": ROWS}
    correction: SamplerCorrection = part(**inputs, **numbers)
    assert not correction.weights_T.requires_grad
    return correction


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, [2.0, 0.5, 2.0, 0.25]),
        ({"level": "none"}, [1.0] * 4),
        ({"low": 0.4, "high": 2.5}, [2.0, 0.5, 2.5, 0.4]),
        ({"low": 0.4, "high": 2.5, "outside": "mask"}, [2.0, 0.5, 0.0, 0.0]),
        ({"level": "sequence", "high": 5.0}, [3.0, 3.0, 3.0, 0.25]),
        ({"level": "sequence", "high": 2.5}, [2.5, 2.5, 2.5, 0.25]),
        ({"level": "sequence", "high": 2.5, "outside": "mask"}, [0.0, 0.0, 0.0, 0.25]),
        ({"level": "geometric"}, [3 ** (1 / 3)] * 3 + [0.25]),
        ({"normalize": True}, [2 / 1.1875, 0.5 / 1.1875, 2 / 1.1875, 0.25 / 1.1875]),
        # The mean of responses is (3 + 0.25) / 2; the row without tokens does not count.
        ({"level": "sequence", "high": 5.0, "normalize": True}, [3 / 1.625] * 3 + [0.25 / 1.625]),
    ],
)
def test_weights_equal_hand_computed_ones(numbers: dict[str, Any], expected: list[float]) -> None:
    correction = correct(**numbers)
    assert correction.weights_T.tolist() == pytest.approx(expected)
    assert correction.keep_T.all()


@pytest.mark.parametrize(
    ("given", "expected"), [({}, [2.0, 0.6, 3.0, 0.0]), ({"high": 2.5}, [2.0, 0.6, 0.0, 0.0])]
)
def test_numbers_of_the_configuration_replace_those_of_a_preset(
    given: dict[str, float], expected: list[float]
) -> None:
    part = load_by_name(ROLLOUT_CORRECTION, "decoupled_token_icepop", given)
    assert correct([2.0, 0.6, 3.0, 0.25], part).weights_T.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rules", "is_kept"),
    [
        ("token_k1 <= 2.1", [True, True, False, False]),
        ("0.4 <= token_k1 <= 4.1", [True, True, False, True]),  # of sampler over trainer
        ("token_k2 <= 0.3", [True, True, False, False]),
        ("token_k3 <= 0.4", [True, True, False, False]),
        ("0.3 <= seq_sum_k1 <= 5", [True, True, True, True]),
        ("0.34 <= seq_sum_k1 <= 5", [False, False, False, True]),
        ("seq_mean_k1 <= 2", [True, True, True, False]),
        ("seq_mean_k2 <= 0.5", [True, True, True, False]),
        ("seq_sum_k2 <= 1", [False, False, False, True]),
        ("seq_sum_k3 <= 0.7", [False, False, False, True]),
        ("seq_mean_k3 <= 0.5", [True, True, True, False]),
        ("seq_max_k2 <= 0.7", [True, True, True, False]),
        ("seq_max_k3 <= 0.7", [False, False, False, True]),
        ("token_k2 <= 0.3, seq_mean_k2 <= 0.5", [True, True, False, False]),
    ],
)
def test_rules_reject_tokens_and_responses(rules: str, is_kept: list[bool]) -> None:
    correction = correct(reject=rules, high=10.0)
    assert correction.keep_T.tolist() == is_kept
    weights = [ratio * keep for ratio, keep in zip(RATIOS, is_kept, strict=True)]
    assert correction.weights_T.tolist() == pytest.approx(weights)


def test_one_token_vetoes_its_response() -> None:
    assert correct(veto=0.3).keep_T.tolist() == [True, True, True, False]
    assert correct(veto=0.6).keep_T.tolist() == [False] * 4
    assert correct([0.5, 2.0, 3.0, 4.0], veto=0.6).keep_T.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("token_k1", "no rule; write it as 0.5 <= token_k1 <= 2"),
        ("seq_men_k1 <= 2", "did you mean 'seq_mean_k1'"),
        ("0.1 <= token_k2 <= 2", "token_k2 has no lower bound; write token_k2 <= 2"),
        ("3 <= token_k1 <= 2", "the lower one first"),
        ("token_k1 <= 0", "ratios above 0"),
    ],
)
def test_a_rule_that_cannot_be_read_says_why(rules: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rejections(rules)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_engines_that_agree_are_not_corrected_at_all(level: str) -> None:
    weights_T = correct([1.0] * 4, level=level, normalize=True).weights_T
    assert torch.equal(weights_T, torch.ones(4))


def test_tokens_impossible_for_one_engine_have_bounded_weights() -> None:
    impossible_T = torch.tensor([-torch.inf, -500.0, -1.0, -1.0])
    possible_T = torch.full((4,), -1.0)
    levels: list[Literal["token", "sequence", "geometric"]] = ["token", "sequence", "geometric"]
    for level in levels:
        up = importance(possible_T, impossible_T, ROWS, level=level, high=3.0).weights_T
        assert up[:2].tolist() == [3.0, 3.0]
        down = importance(impossible_T, possible_T, ROWS, level=level, high=3.0).weights_T
        assert down[:2].max() < 1e-5
        assert down[3] == 1.0


def test_a_batch_without_tokens_has_no_weights() -> None:
    nothing_T = torch.zeros(0)
    rows = TokenRows.on_one_rank(torch.zeros(0, dtype=torch.int64), 2)
    numbers: dict[str, Any] = {"normalize": True, "reject": "seq_max_k2 <= 1", "veto": 0.1}
    assert len(importance(nothing_T, nothing_T, rows, level="sequence", **numbers).weights_T) == 0


CORRECTIONS: list[dict[str, Any]] = [
    {"level": "sequence", "normalize": True, "reject": "seq_mean_k1 <= 1.05, seq_max_k2 <= 0.02"},
    {"level": "geometric", "normalize": True, "veto": 0.8},
    {"level": "token", "normalize": True, "reject": "seq_sum_k3 <= 0.03"},
]


def test_ranks_that_share_rows_correct_as_one() -> None:
    for shared, whole in run_ranks(2, _corrected):
        torch.testing.assert_close(shared, whole)


def _corrected(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    packed = make_packed()
    own_U = torch.arange(rank, packed.rows.num_tokens, 2)
    part = packed.at(own_U, shared_rows(packed.rows, own_U))
    shared, whole = [], []
    for numbers in CORRECTIONS:
        shared.append(part.call(importance, **numbers).weights_T)
        whole.append(packed.call(importance, **numbers).weights_T[own_U])
    return shared, whole
