"""Rewards to advantages on every token, on one core: prints a Markdown table.

python -m benchmarks.advantages
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hybridrl.algorithms.advantages import grpo_advantages
from hybridrl.algorithms.kl import subtract_sequence_kl
from hybridrl.batch import jagged_from, spread_over_tokens

NUM_TOKENS, GROUP_SIZE = 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    num_rows = options.rows
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    lengths_B = torch.full((num_rows,), NUM_TOKENS)
    mask_T = torch.ones(num_rows, NUM_TOKENS, dtype=torch.bool)
    mask_T[:, : NUM_TOKENS // 8] = False  # the prompt
    mask_BL = jagged_from(mask_T.view(-1), lengths_B)
    logprobs_BL = jagged_from(-torch.rand(mask_T.numel(), generator=source), lengths_B)
    rewards_B = torch.rand(num_rows, generator=source)

    def advantages() -> torch.Tensor:
        return grpo_advantages(rewards_B, num_responses=GROUP_SIZE, divide_by_std=True)

    def kl_in_reward() -> torch.Tensor:
        return subtract_sequence_kl(
            rewards_B,
            old_logprobs_BL=logprobs_BL,
            reference_logprobs_BL=logprobs_BL,
            response_mask_BL=mask_BL,
            estimator="k3",
            coefficient=0.1,
        )

    rows = {
        "group-relative advantages, [B]": advantages,
        "the same, given to every token": lambda: spread_over_tokens(advantages(), mask_BL),
        "KL charge in the reward": kl_in_reward,
    }
    print(f"B={num_rows}, T={NUM_TOKENS}, G={GROUP_SIZE}, one thread, {options.repeats} repeats\n")
    print("| what | median ms of the core | median ms by the clock |\n|---|---|---|")
    for name, work in rows.items():
        core_s, clock_s = measure(work, num_repeats=options.repeats)
        print(f"| {name} | {core_s * 1e3:.2f} | {clock_s * 1e3:.2f} |")


def measure(work: Callable[[], object], *, num_repeats: int) -> tuple[float, float]:
    """Return median seconds: the thread's own, which neighbours do not lengthen, and clock's."""
    work()
    core_s, clock_s = [], []
    for _ in range(num_repeats):
        began = time.thread_time(), time.perf_counter()
        work()
        core_s.append(time.thread_time() - began[0])
        clock_s.append(time.perf_counter() - began[1])
    return statistics.median(core_s), statistics.median(clock_s)


if __name__ == "__main__":
    main()
