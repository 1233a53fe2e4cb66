from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Row
from hybridrl.data.source import PromptSource, build_prompt_step, prompt_seed
from tests.data.tokenized import source_of, tokenize_rows


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
