from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.logprobs import token_logprobs
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
