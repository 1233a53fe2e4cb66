"""Log-probs and entropies of given tokens, and divergences from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.divergence import Comparison, TeacherTokens
from hybridrl.models.logprobs import token_logprobs, top_logprobs
from hybridrl.sampler import SamplingMasks


def plainly(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    temperature: float,
    is_left_SV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits_SV = hidden_SH @ weight_VH.T / temperature
    if is_left_SV is not None:
        logits_SV = logits_SV.masked_fill(~is_left_SV, -torch.inf)
    all_logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    finite_SV = all_logprobs_SV.masked_fill(all_logprobs_SV.isinf(), 0.0)
    entropies_S = -(all_logprobs_SV.exp() * finite_SV).sum(-1)
    return all_logprobs_SV.gather(1, targets_S[:, None])[:, 0], entropies_S


def draw(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_SH = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets_S = torch.randint(0, 11, (num_tokens,), generator=generator)
    return hidden_SH.requires_grad_(), weight_VH.requires_grad_(), targets_S


@settings(max_examples=30)
@given(
    num_tokens=st.integers(0, 20),
    chunk_tokens=st.integers(1, 25),
    temperature=st.floats(0.3, 3.0),
    needs_entropy_gradient=st.booleans(),
    has_masks=st.booleans(),
)
def test_values_and_gradients_equal_a_full_log_softmax(
    num_tokens: int,
    chunk_tokens: int,
    temperature: float,
    needs_entropy_gradient: bool,
    has_masks: bool,
) -> None:
    hidden_SH, weight_VH, targets_S = draw(num_tokens)
    is_left_SV = masks = None
    if has_masks:
        is_left_SV = torch.rand(num_tokens, 11, generator=torch.Generator().manual_seed(3)) < 0.4
        is_left_SV[torch.arange(num_tokens), targets_S] = True
        ids_M = is_left_SV.nonzero()[:, 1].int()
        masks = SamplingMasks(ids_M, is_left_SV.sum(1).int())
    results = token_logprobs(
        hidden_SH,
        weight_VH,
        targets_S,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        needs_entropy_gradient=needs_entropy_gradient,
        masks=masks,
    )
    expected = plainly(hidden_SH, weight_VH, targets_S, temperature, is_left_SV)
    slopes = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(2))
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference.float(), atol=1e-5, rtol=2e-6)
    assert results[1].requires_grad is needs_entropy_gradient

    def total(values: tuple[Tensor, ...]) -> Tensor:
        loss = (values[0] * slopes[0]).sum()
        return loss + (values[1] * slopes[1]).sum() if needs_entropy_gradient else loss

    grads = torch.autograd.grad(total(results), (hidden_SH, weight_VH))
    expected_grads = torch.autograd.grad(total(expected), (hidden_SH, weight_VH))
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference, atol=3e-5, rtol=1e-4)


class LargestTensor(TorchDispatchMode):
    num_elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.mark.parametrize("needs_entropy_gradient", [True, False])
def test_no_tensor_of_all_tokens_times_vocabulary_ever_exists(needs_entropy_gradient: bool) -> None:
    hidden_SH, weight_VH, targets_S = draw(512)
    with LargestTensor() as largest:
        logprobs_S, entropies_S = token_logprobs(
            hidden_SH,
            weight_VH,
            targets_S,
            temperature=1.0,
            chunk_tokens=32,
            needs_entropy_gradient=needs_entropy_gradient,
        )
        loss = logprobs_S.sum() + (entropies_S.sum() if needs_entropy_gradient else 0.0)
        loss.backward()
    assert largest.num_elements == 512 * 6  # hidden states; a chunk of logits has 32 * 11


def test_bfloat16_weights_get_bfloat16_gradients() -> None:
    hidden_SH, weight_VH, targets_S = draw(9)
    hidden_SH, weight_VH = (
        t.detach().to(torch.bfloat16).requires_grad_() for t in (hidden_SH, weight_VH)
    )
    logprobs_S, _ = token_logprobs(hidden_SH, weight_VH, targets_S, temperature=1.0, chunk_tokens=4)
    expected_S, _ = plainly(hidden_SH.float(), weight_VH.float(), targets_S, 1.0)
    assert logprobs_S.dtype == torch.float32
    torch.testing.assert_close(logprobs_S, expected_S, atol=0.05, rtol=0)
    logprobs_S.sum().backward()
    assert hidden_SH.grad is not None
    assert weight_VH.grad is not None
    assert (hidden_SH.grad.dtype, weight_VH.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    hidden_SH.grad, frozen = None, weight_VH.detach()  # as beside an adapter
    token_logprobs(hidden_SH, frozen, targets_S, temperature=1.0, chunk_tokens=4)[
        0
    ].sum().backward()
    assert hidden_SH.grad is not None


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


def plain_divergences(teacher_SE: Tensor, student_SE: Tensor, beta: float) -> Tensor:
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
    expected_S = plain_divergences(teacher_SE, student_SE, beta)
    # The probability of all others is 1 less a sum: of a small one float32 knows few digits.
    rest_S = torch.minimum(teacher_SE[:, -1], student_SE[:, -1]).detach()
    is_known_S = (rest_S > 1e-2) | (num_tokens == V)
    slack_S = torch.where(is_known_S, 3e-5, 1e-5 / rest_S)
    assert ((scored[2] - expected_S).abs() <= slack_S).all()
    assert (scored[2] <= plain_divergences(teacher_SV, student_SV, beta) + slack_S).all()
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
