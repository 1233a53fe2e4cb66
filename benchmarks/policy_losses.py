"""Every policy loss, forward and backward, and the parts around it, on one core: a Markdown table.

python -m benchmarks.policy_losses
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.advantages import NUM_TOKENS, print_times
from hybridrl.algorithms.kl import k3, kl_penalty
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.rollout_correction import importance
from hybridrl.algorithms.token_masks import off_policy_mask, top_entropy_mask
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.functions import parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(options.rows)
    work = {
        name: loss_and_gradient(vars(import_module(f"hybridrl.algorithms.{module}"))[name], inputs)
        for name, module in parts.POLICY_LOSS.built_in.items()
    } | others(inputs)
    print(f"B={options.rows}, T={NUM_TOKENS}, one thread, {options.repeats} repeats")
    print_times("part", work, options.repeats, digits=1)


def make_inputs(num_rows: int) -> dict[str, Any]:
    """Make the inputs that parts name, for responses of equal length."""
    source = torch.Generator().manual_seed(0)
    num_tokens = num_rows * NUM_TOKENS
    row_T = torch.arange(num_rows).repeat_interleave(NUM_TOKENS)
    old_T = -torch.rand(num_tokens, generator=source)
    noise_T = 0.1 * torch.randn(num_tokens, generator=source)
    return {
        "current_logprobs_T": (old_T + noise_T).requires_grad_(),
        "old_logprobs_T": old_T,
        "sampler_logprobs_T": old_T + noise_T / 10,
        "reference_logprobs_T": old_T - noise_T,
        "advantages_T": torch.randn(num_rows, generator=source)[row_T],
        "entropy_T": torch.rand(num_tokens, generator=source),
        "rows": TokenRows.on_one_rank(row_T, num_rows),
    }


def loss_and_gradient(
    part: Callable[..., Any], inputs: dict[str, Any], **numbers: object
) -> Callable[[], Tensor]:
    """Return a call of a loss, weighted as by token_mean, and of its backward pass."""
    named = {name: inputs[name] for name in inspect.signature(part).parameters if name in inputs}
    current_T = inputs["current_logprobs_T"]
    weights_T = torch.full_like(current_T, 1 / len(current_T))

    def call() -> Tensor:
        result = part(**named, **numbers)
        losses_T = result.losses_T if isinstance(result, PolicyLoss) else result
        (grad_T,) = torch.autograd.grad((losses_T * weights_T).sum(), current_T)
        return grad_T

    return call


def others(inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return calls of the parts around a loss."""
    current_T, old_T, rows = (inputs[n] for n in ("current_logprobs_T", "old_logprobs_T", "rows"))
    sampler_T, advantages_T = inputs["sampler_logprobs_T"], inputs["advantages_T"]
    rule = "0.999 <= seq_mean_k1 <= 1.001"
    return {
        "KL penalty, k3 times the ratio": loss_and_gradient(
            kl_penalty, inputs, estimator=k3, gradient="ratio"
        ),
        "importance, token": lambda: importance(old_T, sampler_T, rows),
        "importance, sequence with a rejection": lambda: importance(
            old_T, sampler_T, rows, level="sequence", reject=rule
        ),
        "off_policy_mask": lambda: off_policy_mask(current_T, sampler_T, advantages_T, rows),
        "top_entropy_mask": lambda: top_entropy_mask(inputs["entropy_T"], rows),
    }


if __name__ == "__main__":
    main()
