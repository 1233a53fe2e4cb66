"""Rewards and values to advantages and returns on every token, on one core: a Markdown table.

python -m benchmarks.gae
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.advantages import measure
from hybridrl.algorithms.gae import generalized_advantages, whiten
from hybridrl.batch import jagged_from, place_on_last_tokens

NUM_TOKENS, NUM_PROMPT_TOKENS = 2048, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    num_rows = options.rows
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    full_B = torch.full((num_rows,), NUM_TOKENS)
    uneven_B = torch.randint(1, NUM_TOKENS + 1, (num_rows,), generator=source)
    print(f"B={num_rows}, one thread, response tokens T of a row beside {NUM_PROMPT_TOKENS} others")
    print("\n| what | response tokens | median ms of the core | median ms by the clock |")
    print("|---|---|---|---|")
    for name, lengths_B in ((f"T={NUM_TOKENS}", full_B), (f"T=1 to {NUM_TOKENS}", uneven_B)):
        mask_BL = make_mask(lengths_B)
        values_BL, rewards_BL = make_columns(mask_BL, source)

        def advantages(
            mask_BL: Tensor = mask_BL,
            values_BL: Tensor = values_BL,
            rewards_BL: Tensor = rewards_BL,
        ) -> Tensor:
            estimate = generalized_advantages(
                rewards_BL, values_BL=values_BL, response_mask_BL=mask_BL, gamma=1.0, lam=0.95
            )
            return estimate.advantages_BL

        def whitened(mask_BL: Tensor = mask_BL, values_BL: Tensor = values_BL) -> Tensor:
            return whiten(values_BL, mask_BL)

        for what, work in (("GAE and returns", advantages), ("whitening", whitened)):
            core_s, clock_s = measure(work, num_repeats=options.repeats)
            num_tokens = int(lengths_B.sum())
            print(f"| {what}, {name} | {num_tokens:,} | {core_s * 1e3:.1f} | {clock_s * 1e3:.1f} |")


def make_mask(lengths_B: Tensor) -> Tensor:
    parts = [torch.ones(int(length) + NUM_PROMPT_TOKENS, dtype=torch.bool) for length in lengths_B]
    for part in parts:
        part[:NUM_PROMPT_TOKENS] = False
    return jagged_from(torch.cat(parts), lengths_B + NUM_PROMPT_TOKENS)


def make_columns(mask_BL: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    values_T = torch.rand(mask_BL.values().shape, generator=source)
    rewards_B = torch.rand(len(mask_BL), generator=source)
    values_BL = jagged_from(values_T, mask_BL.offsets().diff())  # type: ignore[attr-defined]
    return values_BL, place_on_last_tokens(rewards_B, mask_BL)


if __name__ == "__main__":
    main()
