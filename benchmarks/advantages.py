"""Rewards to advantages on one core: a Markdown table of every estimator.

python -m benchmarks.advantages
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.sides.measure import print_head, print_row, seconds_of
from hybridrl.algorithms.advantages.distillation import distillation
from hybridrl.algorithms.advantages.gae import gae
from hybridrl.algorithms.advantages.gdpo import gdpo
from hybridrl.algorithms.advantages.gpg import gpg
from hybridrl.algorithms.advantages.grpo import grpo, grpo_passk
from hybridrl.algorithms.advantages.opmd import opmd
from hybridrl.algorithms.advantages.opo import opo
from hybridrl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridrl.algorithms.advantages.reinforce import (
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from hybridrl.algorithms.advantages.remax import remax
from hybridrl.algorithms.advantages.rloo import rloo
from hybridrl.algorithms.group_filter import mean_within, zero_variance
from hybridrl.algorithms.kl import estimate_response_kl, k3
from hybridrl.batch import jagged_from, place_on_last_tokens, spread_over_tokens

NUM_TOKENS, NUM_PROMPT_TOKENS, GROUP_SIZE, NUM_REWARDS = 2048, 256, 8, 3


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Columns of one step, by the names that estimators give them."""

    response_mask_BL: Tensor
    logprobs_BL: Tensor
    values_BL: Tensor
    rewards_BL: Tensor
    rewards_B: Tensor
    group_B: Tensor
    reward_parts_BK: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    full = make_inputs(torch.full((options.rows,), NUM_TOKENS), source)
    lengths_B = torch.randint(1, NUM_TOKENS + 1, (options.rows,), generator=source)
    uneven = make_inputs(lengths_B, source)
    print(
        f"B={options.rows}, {NUM_TOKENS} response tokens of a row beside {NUM_PROMPT_TOKENS} "
        f"others, G={GROUP_SIZE}, one thread, {options.repeats} repeats"
    )
    uneven_gae = {f"gae, 1 to {NUM_TOKENS} response tokens": of_tokens(uneven)["gae"]}
    print_times("what", of_rows(full) | of_tokens(full) | uneven_gae, options.repeats, digits=2)


def of_rows(x: Inputs) -> dict[str, Callable[[], object]]:
    rewards = (x.rewards_B, x.group_B)
    mask_BL, weights_K = x.response_mask_BL, torch.ones(NUM_REWARDS)
    return {
        "grpo": lambda: grpo(*rewards),
        "grpo, std of the batch": lambda: grpo(*rewards, scale="batch"),
        "grpo without std (Dr. GRPO)": lambda: grpo(*rewards, scale="none"),
        "grpo_passk": lambda: grpo_passk(*rewards),
        "rloo": lambda: rloo(*rewards),
        "gpg": lambda: gpg(*rewards),
        "opmd": lambda: opmd(*rewards),
        "opmd, logavgexp": lambda: opmd(*rewards, baseline="logavgexp"),
        "opo": lambda: opo(*rewards, mask_BL),
        "reinforce_plus_plus_baseline": lambda: reinforce_plus_plus_baseline(*rewards, mask_BL),
        f"gdpo, {NUM_REWARDS} rewards": lambda: gdpo(
            x.reward_parts_BK, weights_K, x.group_B, mask_BL, whiten_over="tokens"
        ),
        "zero_variance": lambda: zero_variance(*rewards),
        "mean_within": lambda: mean_within(*rewards),
        "one number per row, given to every token": lambda: spread_over_tokens(
            x.rewards_B, mask_BL
        ),
    }


def of_tokens(x: Inputs) -> dict[str, Callable[[], object]]:
    rewards_BL, mask_BL, logprobs_BL = x.rewards_BL, x.response_mask_BL, x.logprobs_BL
    return {
        "gae": lambda: gae(rewards_BL, x.values_BL, mask_BL),
        "reinforce": lambda: reinforce(rewards_BL, mask_BL),
        "reinforce_plus_plus": lambda: reinforce_plus_plus(rewards_BL, mask_BL),
        "remax": lambda: remax(rewards_BL, x.rewards_B, mask_BL),
        "distillation": lambda: distillation(logprobs_BL, x.values_BL, mask_BL),
        "optimal_token_baseline": lambda: optimal_token_baseline(
            rewards_BL, x.group_B, mask_BL, logprobs_BL, x.values_BL
        ),
        "KL for a charge in the reward": lambda: estimate_response_kl(
            logprobs_BL, logprobs_BL, mask_BL, estimator=k3
        ),
    }


def make_inputs(response_lengths_B: Tensor, source: torch.Generator) -> Inputs:
    num_rows = len(response_lengths_B)
    lengths_B = response_lengths_B + NUM_PROMPT_TOKENS
    before_B = lengths_B.cumsum(0) - lengths_B
    num_tokens = int(lengths_B.sum())
    positions_T = torch.arange(num_tokens) - before_B.repeat_interleave(lengths_B)
    mask_BL = jagged_from(positions_T >= NUM_PROMPT_TOKENS, lengths_B)
    rewards_B = torch.rand(num_rows, generator=source)
    return Inputs(
        response_mask_BL=mask_BL,
        logprobs_BL=jagged_from(-torch.rand(num_tokens, generator=source), lengths_B),
        values_BL=jagged_from(torch.rand(num_tokens, generator=source), lengths_B),
        rewards_BL=place_on_last_tokens(rewards_B, mask_BL),
        rewards_B=rewards_B,
        group_B=torch.arange(num_rows) // GROUP_SIZE,
        reward_parts_BK=torch.rand(num_rows, NUM_REWARDS, generator=source),
    )


def print_times(
    what: str, ways: Mapping[str, Callable[[], object]], num_repeats: int, *, digits: int
) -> None:
    """Print medians: of the thread's own seconds, which neighbours do not lengthen, and clock's."""
    print()
    print_head(what, "median ms of the core", "median ms by the clock", num_texts=3)
    for name, work in ways.items():
        work()
        core_s, clock_s = [], []
        for _ in range(num_repeats):
            began = time.thread_time()
            clock_s.append(seconds_of(work))
            core_s.append(time.thread_time() - began)
        medians = (1e3 * statistics.median(seconds) for seconds in (core_s, clock_s))
        print_row(name, *(f"{ms:.{digits}f}" for ms in medians))


if __name__ == "__main__":
    main()
