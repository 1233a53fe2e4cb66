"""The order of rows, of one set, of a mix or by solve rates, and the stream of prompts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from hybridrl.config.data import MOST_SOURCES
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row, SamplerState, fingerprint
from hybridrl.data.sampler import MixSampler, RowSampler, SolveRates, SolveRateSampler
from hybridrl.data.source import PromptSource, build_prompt_step, prompt_seed
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from tests.data.tokenized import source_of, tokenize_rows


def sampler(num_rows: int, *, seed: int = 0, shuffle: bool = True) -> RowSampler:
    return RowSampler(num_rows, seed=seed, shuffle=shuffle, fingerprint="f" * 64)


@given(num_rows=st.integers(1, 40), sizes=st.lists(st.integers(1, 50), max_size=8))
def test_every_epoch_holds_every_row_once_whatever_the_batches(
    num_rows: int, sizes: list[int]
) -> None:
    source = sampler(num_rows)
    drawn = [row for size in sizes for row in source.draw(size)]
    assert len(drawn) == source.num_drawn == sum(sizes)
    for start in range(0, len(drawn), num_rows):
        epoch = drawn[start : start + num_rows]
        assert max(Counter(epoch).values()) == 1
    assert drawn == sampler(num_rows).draw(len(drawn))  # the batches do not change the order


@pytest.mark.shows("R2.2")
@given(num_rows=st.integers(1, 20), before=st.integers(0, 60), after=st.integers(0, 60))
def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(
    num_rows: int, before: int, after: int
) -> None:
    source = sampler(num_rows)
    source.draw(before)
    saved = json.dumps(asdict(source.state()))
    resumed = sampler(num_rows)
    resumed.draw(7)
    resumed.restore(SamplerState(**json.loads(saved)))
    assert resumed.draw(after) == source.draw(after)
    assert resumed.state() == source.state()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = sampler(50)
    orders = [source.draw(50), source.draw(50), sampler(50, seed=1).draw(50)]
    assert len({tuple(order) for order in orders}) == 3
    assert sampler(3, shuffle=False).draw(7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_state_saved_over_other_rows_is_refused() -> None:
    with pytest.raises(DataError, match="the data has changed: rows: aaaaaaaaaaaa there"):
        sampler(4).restore(SamplerState(3, "a" * 64))


def mix(sizes: dict[str, int], weights: list[float], *, changed: str = "") -> MixSampler:
    samplers = {
        name: RowSampler(
            size, seed=3, shuffle=True, fingerprint=name * (2 if name == changed else 1)
        )
        for name, size in sizes.items()
    }
    return MixSampler(samplers, weights, seed=5)


@given(
    weights=st.lists(st.floats(0.1, 50), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=6, max_size=6),
)
def test_a_mix_draws_each_source_by_its_weight(weights: list[float], sizes: list[int]) -> None:
    named = {f"s{n}": size for n, size in enumerate(sizes[: len(weights)])}
    drawn = mix(named, weights).draw(1000)
    begin = 0
    for size, weight in zip(named.values(), weights, strict=True):
        rows = [row - begin for row in drawn if begin <= row < begin + size]
        assert abs(len(rows) - 1000 * weight / sum(weights)) <= 3 * len(weights)
        for first in range(0, len(rows) - size + 1, size):  # each epoch of a source is complete
            assert sorted(rows[first : first + size]) == list(range(size))
        begin += size


@given(
    num_drawn=st.integers(0, 3 * MOST_SOURCES), weights=st.tuples(st.floats(0.01, 9), st.just(1.0))
)
def test_a_restored_mix_draws_what_an_unbroken_one_draws(
    num_drawn: int, weights: tuple[float, float]
) -> None:
    sizes = {"a": 7, "b": 40}
    unbroken = mix(sizes, list(weights))
    unbroken.draw(num_drawn)
    saved = json.loads(json.dumps(asdict(unbroken.state())))
    resumed = mix(sizes, list(weights))
    resumed.restore(SamplerState(**saved))
    assert resumed.num_drawn == num_drawn
    assert resumed.draw(500) == unbroken.draw(500)


def test_a_mix_names_the_source_that_changed() -> None:
    state = mix({"a": 2, "b": 2}, [1.0, 1.0]).state()
    with pytest.raises(DataError, match=r"has changed: b: b there, bb here; bring"):
        mix({"a": 2, "b": 2}, [1.0, 1.0], changed="b").restore(state)
    with pytest.raises(DataError, match=r"has changed: c: none there, c here"):
        mix({"a": 2, "b": 2, "c": 1}, [1.0, 1.0, 1.0]).restore(state)


def test_an_order_by_difficulty_shuffles_equal_rows() -> None:
    def ordered(seed: int) -> RowSampler:
        levels = [float(n % 3) for n in range(30)]
        return RowSampler(30, seed=seed, shuffle=True, fingerprint="f", difficulties=levels)

    first, second = ordered(0), ordered(0)
    epochs = [first.draw(30), first.draw(30)]
    for epoch in epochs:
        assert [row % 3 for row in epoch] == [0] * 10 + [1] * 10 + [2] * 10
    assert epochs[0] != epochs[1]
    assert ordered(1).draw(30) != epochs[0]
    second.restore(SamplerState(35, "f"))
    assert second.draw(25) == epochs[1][5:]


def test_fingerprints_and_orders_are_those_of_earlier_versions() -> None:
    """Checkpoints hold a fingerprint and a number of rows: others would resume with other rows."""
    rows = [
        Row("é 1", "2", "s", "f:1"),
        Row((Message("user", "a"), Message("assistant", "b")), "c", "s", "f:2", 1.5),
        Row("p", "better", "t", "f:3", rejected="worse", margin=0.5),
        Row("q", "a", "t", "f:4", own='{"extra": [1]}'),
    ]
    digest = "8c8e69186f99a6ee4c087902d8d615a0c64999fb61806c268f8f43aeb2cb74e7"
    assert fingerprint(rows) == digest
    tokenizer = build_starter_tokenizer()
    table = tokenize_rows(rows[:1] + rows[2:], tokenizer)
    assert table.fingerprint == fingerprint(rows[:1] + rows[2:])
    assert sampler(5, seed=7).draw(12) == [4, 2, 1, 0, 3, 4, 1, 2, 3, 0, 0, 3]
    by_difficulty = RowSampler(
        6, seed=7, shuffle=True, fingerprint="", difficulties=[0, 1, 0, 1, 0, 1]
    )
    assert by_difficulty.draw(8) == [4, 2, 0, 5, 1, 3, 4, 2]
    mix = MixSampler({"a": sampler(5, seed=7), "b": sampler(4, seed=7)}, [1, 3], seed=7)
    assert mix.draw(20) == [4, 7, 2, 1, 6, 5, 8, 0, 3, 8, 7, 4, 6, 5, 5, 8, 1, 2, 6, 7]
    mix.draw(1000)
    assert mix.draw(6) == [6, 3, 4, 2, 8, 1]
    assert [prompt_seed(7, index) for index in (0, 1)] == [2991332791445805579, 583649986783347047]


SIZES = (9, 6)
ROWS = tokenize_rows(
    [Row(prompt=f"{n}=", answer="1", source="a", origin=f"f:{n}") for n in range(sum(SIZES))],
    build_starter_tokenizer(),
)


def by_solve_rates(seed: int = 0) -> PromptSource:
    """Draw from a mix by the solve rates of its rows."""
    rates, first = SolveRates(len(ROWS)), SIZES[0]
    samplers = {
        name: SolveRateSampler(counts_N2, seed=seed, fingerprint="f", name=name)
        for name, counts_N2 in (("a", rates.counts_N2[:first]), ("b", rates.counts_N2[first:]))
    }
    mix = MixSampler(samplers, [1.0, 2.0], seed=seed)
    return PromptSource(ROWS, num_prompts=4, seed=seed, sampler=mix, solve_rates=rates)


def solve_step(source: PromptSource) -> list[str]:
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
    source = by_solve_rates()
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
    unbroken = by_solve_rates()
    for _ in range(num_before):
        solve_step(unbroken)
    saved = json.loads(json.dumps(asdict(unbroken.state())))
    resumed = by_solve_rates()
    solve_step(resumed)  # of another past
    resumed.restore(SamplerState(**saved))
    assert [solve_step(resumed) for _ in range(6)] == [solve_step(unbroken) for _ in range(6)]
    assert resumed.state() == unbroken.state()
    assert [solve_step(by_solve_rates(seed=1)) for _ in range(3)] != [
        solve_step(by_solve_rates()) for _ in range(3)
    ]


def test_sources_of_as_many_rows_have_orders_of_their_own() -> None:
    counts_N2 = SolveRates(40).counts_N2
    one, other = (
        SolveRateSampler(counts_N2, seed=0, fingerprint="f", name=name).draw(40) for name in "ab"
    )
    assert one != other


def test_a_draw_of_a_mix_holds_no_row_twice() -> None:
    source = by_solve_rates()
    for _ in range(20):
        texts = solve_step(source)
        assert len(set(texts)) == len(texts)


@pytest.fixture
def rows(tokenizer: PreTrainedTokenizerBase) -> list[TokenizedRow]:
    data = [Row(f"{n}" * (n + 1) + "=", f"{n}", "s", f"f:{n}") for n in range(5)]
    return list(tokenize_rows(data, tokenizer))


def source(rows: list[TokenizedRow], *, seed: int = 0) -> PromptSource:
    return source_of(rows, num_prompts=3, seed=seed)


def test_a_step_holds_tokens_and_rows_in_the_same_order(rows: list[TokenizedRow]) -> None:
    step = source(rows).next()
    assert len(step.prompts) == len(step.rows) == 3
    for token_ids, row in zip(step.prompts.token_ids_PL.unbind(), step.rows, strict=True):
        assert torch.equal(token_ids, row.token_ids)


def test_no_two_prompts_of_a_run_share_an_index_or_a_seed(rows: list[TokenizedRow]) -> None:
    stream = source(rows)
    steps = [stream.next() for _ in range(9)]
    assert torch.cat([s.prompts.prompt_index_P for s in steps]).tolist() == list(range(27))
    assert len(set(torch.cat([s.prompts.seed_P for s in steps]).tolist())) == 27
    assert stream.epoch == 27 / 5


def test_open_prompts_that_came_back_and_were_not_drawn_yet_are_saved_again(
    rows: list[TokenizedRow],
) -> None:
    stream = source(rows)
    stream.next()
    state = replace(stream.state(), open_prompts=(0, 2))
    resumed = source(rows)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.next(1).prompts.prompt_index_P.tolist() == [0]
    assert resumed.state() == replace(state, open_prompts=(2,))


def test_an_attempt_that_begins_again_has_no_prompt_open(rows: list[TokenizedRow]) -> None:
    stream = source(rows)
    begin = stream.state()
    stream.open.add(stream.next())
    assert stream.state().open_prompts == (0, 1, 2)
    stream.restore(begin)
    assert stream.state() == begin


def test_seeds_depend_on_run_index_and_stream_and_fit_int64() -> None:
    seeds = {
        prompt_seed(run, index, stream=stream)
        for run in range(10)
        for index in range(100)
        for stream in ("train", "eval")
    }
    assert len(seeds) == 2000
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63


def test_held_out_rows_become_one_step(rows: list[TokenizedRow]) -> None:
    step = build_prompt_step(rows, range(len(rows)), seed=0, stream="eval")
    assert step.rows == tuple(rows)
    assert step.prompts.seed_P[0].item() == prompt_seed(0, 0, stream="eval")
