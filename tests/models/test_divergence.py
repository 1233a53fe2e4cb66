from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.models.divergence import Comparison, TeacherTokens
from hybridrl.models.logprobs import token_logprobs, top_logprobs
from tests.models.test_logprobs import LargestTensor, draw

V = 11
BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


def teach(num_scored: int, num_tokens: int, temperature: float = 1.0) -> tuple[TeacherTokens, Any]:
    """Return the teacher's likeliest tokens, and its full distribution, [S, V]."""
    hidden_SH, weight_VH, _ = draw(num_scored, seed=1)
    tokens = top_logprobs(
        hidden_SH, weight_VH, num_tokens=num_tokens, temperature=temperature, chunk_tokens=3
    )
    return tokens, torch.softmax((hidden_SH @ weight_VH.T / temperature).detach(), dim=-1)


def of_events(probs_SV: Tensor, ids_SK: Tensor) -> Tensor:
    named_SK = probs_SV.gather(1, ids_SK)
    return torch.cat([named_SK, 1 - named_SK.sum(1, keepdim=True)], dim=1)


def plainly(teacher_SE: Tensor, student_SE: Tensor, beta: float) -> Tensor:
    """Write GKD's equation 1 out with probabilities, and the KL divergences that TRL ends it by."""

    def kl(one_SE: Tensor, other_SE: Tensor) -> Tensor:
        return (one_SE * (one_SE / other_SE).log()).sum(1)

    if beta in (0.0, 1.0):
        return kl(student_SE, teacher_SE) if beta else kl(teacher_SE, student_SE)
    mixture_SE = beta * teacher_SE + (1 - beta) * student_SE
    return beta * kl(teacher_SE, mixture_SE) + (1 - beta) * kl(student_SE, mixture_SE)


@example(num_scored=3, num_tokens=V, chunk_tokens=2, temperature=1.5, beta=0.5)
@example(num_scored=3, num_tokens=V - 1, chunk_tokens=2, temperature=1.5, beta=0.5)
@settings(max_examples=60, deadline=None)
@given(
    num_scored=st.integers(0, 9),
    num_tokens=st.integers(1, V),
    chunk_tokens=st.integers(1, 12),
    temperature=st.floats(1.0, 2.0),
    beta=BETAS,
)
def test_values_and_gradients_are_those_of_the_formula_over_the_teachers_likeliest_tokens(
    num_scored: int, num_tokens: int, chunk_tokens: int, temperature: float, beta: float
) -> None:
    tokens, teacher_SV = teach(num_scored, num_tokens, temperature)
    hidden_SH, weight_VH, targets_S = draw(num_scored)
    scored = token_logprobs(
        hidden_SH,
        weight_VH,
        targets_S,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        comparison=Comparison(tokens, beta),
    )
    student_SV = torch.softmax(hidden_SH @ weight_VH.T / temperature, dim=-1)
    teacher_SE, student_SE = teacher_SV, student_SV  # all tokens: the exact divergence
    if num_tokens < V:
        ids_SK = teacher_SV.topk(num_tokens).indices
        teacher_SE, student_SE = of_events(teacher_SV, ids_SK), of_events(student_SV, ids_SK)
    expected_S = plainly(teacher_SE, student_SE, beta)
    # The probability of all others is 1 less a sum: of a small one float32 knows few digits.
    rest_S = torch.minimum(teacher_SE[:, -1], student_SE[:, -1]).detach()
    is_known_S = (rest_S > 1e-2) | (num_tokens == V)
    slack_S = torch.where(is_known_S, 3e-5, 1e-5 / rest_S)
    assert ((scored[2] - expected_S).abs() <= slack_S).all()
    assert (scored[2] <= plainly(teacher_SV, student_SV, beta) + slack_S).all()
    # Log-probs, whose gradient comes together with the divergence's, are as without a teacher.
    alone = token_logprobs(
        hidden_SH, weight_VH, targets_S, temperature=temperature, chunk_tokens=chunk_tokens
    )
    assert torch.equal(scored[0], alone[0])
    assert torch.equal(scored[1], alone[1])
    slopes_S = torch.randn(num_scored, generator=torch.Generator().manual_seed(2)) * is_known_S
    leaves = (hidden_SH, weight_VH)
    grads = torch.autograd.grad((scored[2] * slopes_S).sum() + scored[0].sum(), leaves)
    chosen_S = student_SV.log().gather(1, targets_S[:, None])
    references = torch.autograd.grad((expected_S * slopes_S).sum() + chosen_S.sum(), leaves)
    for grad, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(grad, reference, atol=2e-4, rtol=2e-4)


def test_tokens_of_a_teacher_survive_as_columns_and_are_chosen_by_position() -> None:
    for num_tokens in (1, 4, V):
        tokens, _ = teach(6, num_tokens)
        again = TeacherTokens.of_columns(tokens.columns(), num_tokens)[torch.tensor([4, 0])]
        assert torch.equal(again.logprobs_SK, tokens.logprobs_SK[[4, 0]])
        assert (again.ids_SK is None) is (num_tokens == V)
        if again.ids_SK is not None and tokens.ids_SK is not None:
            assert torch.equal(again.ids_SK, tokens.ids_SK[[4, 0]])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(beta: float) -> None:
    hidden_SH, weight_VH, targets_S = draw(5)
    for num_tokens in (1, 4, V):
        tokens = top_logprobs(
            hidden_SH, weight_VH, num_tokens=num_tokens, temperature=1.0, chunk_tokens=2
        )
        *_, divergences_S = token_logprobs(
            hidden_SH,
            weight_VH,
            targets_S,
            temperature=1.0,
            chunk_tokens=2,
            comparison=Comparison(tokens, beta),
        )
        (grad_SH,) = torch.autograd.grad(divergences_S.sum(), hidden_SH)
        torch.testing.assert_close(divergences_S, torch.zeros(5), atol=1e-6, rtol=0)
        torch.testing.assert_close(grad_SH, torch.zeros_like(grad_SH), atol=1e-5, rtol=0)


def test_a_comparison_of_few_tokens_never_makes_all_logits() -> None:
    tokens, _ = teach(512, 2)
    hidden_SH, weight_VH, targets_S = draw(512)
    with LargestTensor() as largest:
        *_, divergences_S = token_logprobs(
            hidden_SH,
            weight_VH,
            targets_S,
            temperature=1.0,
            chunk_tokens=32,
            comparison=Comparison(tokens, 0.5),
        )
        divergences_S.sum().backward()
        top_logprobs(hidden_SH, weight_VH, num_tokens=2, temperature=1.0, chunk_tokens=32)
    assert largest.num_elements == 512 * 6  # hidden states
