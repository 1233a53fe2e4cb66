from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from hybridrl.data.rows import Row, SamplerState
from hybridrl.data.sampler import MixSampler
from hybridrl.data.solve_rates import SolveRates, SolveRateSampler
from hybridrl.data.source import PromptSource
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from tests.data.tokenized import tokenize_rows

SIZES = (9, 6)
ROWS = tokenize_rows(
    [Row(prompt=f"{n}=", answer="1", source="a", origin=f"f:{n}") for n in range(sum(SIZES))],
    build_starter_tokenizer(),
)


def source_of(seed: int = 0) -> PromptSource:
    """Draw from a mix by the solve rates of its rows."""
    rates, first = SolveRates(len(ROWS)), SIZES[0]
    samplers = {
        name: SolveRateSampler(counts_N2, seed=seed, fingerprint="f", name=name)
        for name, counts_N2 in (("a", rates.counts_N2[:first]), ("b", rates.counts_N2[first:]))
    }
    mix = MixSampler(samplers, [1.0, 2.0], seed=seed)
    return PromptSource(ROWS, num_prompts=4, seed=seed, sampler=mix, solve_rates=rates)


def step(source: PromptSource) -> list[str]:
    """Draw, and solve even numbers always, odd ones never; return the prompts."""
    task = source.next()
    texts = [row.prompt_text for row in task.rows]
    index_B = task.prompts.prompt_index_P.repeat_interleave(4)
    rewards = [float(int(text[:-1]) % 2 == 0) for text in texts for _ in range(4)]
    source.note_rewards(index_B, torch.tensor(rewards))
    return texts


def test_rows_come_in_the_ratio_of_the_variance_of_their_success() -> None:
    rates = SolveRates(4)
    for row, num_solved in enumerate((0.0, 2.0, 4.0)):  # of 4; the last has no response
        rates.note(row, num_responses=4, num_solved=num_solved)
    draws = Counter[int]()
    sampler = SolveRateSampler(rates.counts_N2, seed=1, fingerprint="f", name="")
    for _ in range(4000):
        draws.update(sampler.draw(1))
    weights = [1 / 6 * 5 / 6, 1 / 4, 5 / 6 * 1 / 6, 1 / 4]
    for row, weight in enumerate(weights):
        assert draws[row] / 4000 == pytest.approx(weight / sum(weights), abs=0.02)
    assert sorted(sampler.draw(4)) == [0, 1, 2, 3]
    assert set(Counter(sampler.draw(9)).values()) == {2, 3}


def test_earlier_responses_count_half_and_left_out_ones_not_at_all() -> None:
    source = source_of()
    task = source.next()
    index_P = task.prompts.prompt_index_P
    left_out = torch.tensor([False, False, False, True])
    source.note_rewards(index_P, torch.tensor([1.0, 0.25, 3.0, 1.0]), is_left_out_B=left_out)
    known = [counts for _, *counts in source.state().solve_rates]
    assert sorted(known) == [[1.0, 0.25], [1.0, 1.0], [1.0, 1.0]]
    rates = SolveRates(1)
    rates.note(0, num_responses=4, num_solved=4)
    rates.note(0, num_responses=2, num_solved=0)
    assert rates.state() == ((0, 4.0, 2.0),)


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_restored_source_draws_what_an_unbroken_one_draws(num_before: int) -> None:
    unbroken = source_of()
    for _ in range(num_before):
        step(unbroken)
    saved = json.loads(json.dumps(asdict(unbroken.state())))
    resumed = source_of()
    step(resumed)  # of another past
    resumed.restore(SamplerState(**saved))
    assert [step(resumed) for _ in range(6)] == [step(unbroken) for _ in range(6)]
    assert resumed.state() == unbroken.state()
    assert [step(source_of(seed=1)) for _ in range(3)] != [step(source_of()) for _ in range(3)]


def test_a_draw_of_a_mix_holds_no_row_twice() -> None:
    source = source_of()
    for _ in range(20):
        texts = step(source)
        assert len(set(texts)) == len(texts)
