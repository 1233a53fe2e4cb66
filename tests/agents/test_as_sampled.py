"""The rows of a training batch hold what the sampler returned, position by position.

Random conversations take the whole way of a rollout phase: prompts, agents, tools, the chat
template of three families, limits, and the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.rollout import AgentRollout
from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.config.agent import AgentConfig
from hybridrl.data.prompts import encode_row
from hybridrl.sampler import SamplingParams, request_key
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.agents.chat_templates import TOKENIZERS
from tests.agents.fake_sampler import ROW, FakeSampler, Request
from tests.config.values import config_of
from tests.drawn import cases

HERE = Path(__file__).parent
CONFIG = replace(
    config_of("agent=tool_calls", "data=calculator", "agent.tool_format=pythonic").agent,
    tools=(f"{HERE / 'tools_file.py'}:echo", f"{HERE / 'tools_file.py'}:explode"),
    num_conversations=1,  # the script is then read in the order of rows
)
LOOPS = ("tool_calls", f"{HERE / 'own_agents.py'}:TellsTheAnswer")
NUM_PROMPTS, GROUP = 2, 2
NUM_CONVERSATIONS = 1000

_CALLS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "NAME", "arguments": {"text": "TEXT"}}\n'
    "</tool_call>",
    "llama3_json": '{"name": "NAME", "parameters": {"text": "TEXT"}}',
    "pythonic": '[NAME(text="TEXT")]',
}


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    called: str | None

    def write(self, style: str) -> str:
        if self.called is None:
            return self.text
        escaped = self.text.encode("unicode_escape").decode().replace('"', '\\"')
        return _CALLS[style].replace("NAME", self.called).replace("TEXT", escaped)


_TEXTS = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "<|eot_id|>", "é\n\U0001f600", ""])
_TEXTS |= st.text(max_size=6).map("<think>\nhm\n</think>\n\n{}".format)
_TURNS = st.builds(Turn, _TEXTS, st.sampled_from(["echo"] * 5 + ["explode", "nobody", None]))


def _prompts(answers: Sequence[str]) -> PromptBatch:
    rows = [replace(ROW, answer=answer) for answer in answers]
    token_ids = [torch.arange(65, 66 + number) for number in range(len(rows))]
    return PromptBatch(
        token_ids_PL=jagged(token_ids),
        prompt_index_P=torch.arange(len(rows)),
        seed_P=torch.arange(len(rows)) + 11,
        row_PN=jagged([encode_row(row) for row in rows]),
        batch_size=[len(rows)],
    )


def _roll_out(
    config: AgentConfig, prompts: PromptBatch, sampler: FakeSampler, *, limit: int
) -> RolloutBatch:
    stops = (sampler.tokenizer.eos_token_id,)
    rollout = AgentRollout(config, sampler.tokenizer, stop_token_ids=stops, max_prompt_tokens=8000)
    sampling = SamplingParams(
        num_responses_per_prompt=GROUP, max_response_tokens=limit, temperature=1.0
    )
    samples = asyncio.run(rollout.program(prompts, sampling)(sampler))
    rollout.close()
    return assemble_rollouts(prompts, samples, policy_version=3)


def _requests_of(sampler: FakeSampler, prompts: PromptBatch, row: int) -> list[Request]:
    seed, response_index = int(prompts.seed_P[row // GROUP]), row % GROUP
    by_key = {request.key: request for request in sampler.requests}
    assert len(by_key) == len(sampler.requests)
    keys = [request_key(seed, response_index, turn=turn) for turn in range(len(by_key))]
    return [by_key[key] for key in keys if key in by_key]


def _assert_as_sampled(
    batch: RolloutBatch, row: int, prompt: list[int], requests: Sequence[Request]
) -> int:
    """Compare a row with the records; returns the number of its sequences.

    A request continues the last sequence, or begins one when that has its length.
    """
    assert batch.sequence_lengths_BQ is not None
    lengths = batch.sequence_lengths_BQ.unbind()[row].tolist()
    sequences = [prompt[:]]
    is_trained, logprobs = [False] * len(prompt), [0.0] * len(prompt)
    for number, request in enumerate(requests):
        if number and len(sequences[-1]) == lengths[len(sequences) - 1]:
            sequences.append([])
        latest, sampled = sequences[-1], request.sample.token_ids.tolist()
        assert request.context[: len(latest)] == latest
        new = request.context[len(latest) :]
        latest += new + sampled
        is_trained += [False] * len(new) + [True] * len(sampled)
        logprobs += [0.0] * len(new) + request.sample.logprobs.tolist()
    assert lengths == [len(sequence) for sequence in sequences]
    for column, expected in (
        (batch.token_ids_BL, [token for sequence in sequences for token in sequence]),
        (batch.response_mask_BL, is_trained),
        (batch.sampler_logprobs_BL, logprobs),
    ):
        assert column.unbind()[row].tolist() == expected
    return len(lengths)


@cases(by_day=60, by_night=NUM_CONVERSATIONS // (NUM_PROMPTS * GROUP))
@given(
    family=st.sampled_from(sorted(TOKENIZERS)),
    style=st.sampled_from(sorted(_CALLS)),
    loop=st.sampled_from(LOOPS),
    history=st.sampled_from(["keep", "branch"]),
    turns=st.lists(_TURNS, min_size=1, max_size=7),
    answers=st.lists(_TEXTS, min_size=NUM_PROMPTS, max_size=NUM_PROMPTS),
    limit=st.just(4000) | st.integers(1, 900),
    context=st.just(5000) | st.integers(1, 1200),
    max_turns=st.just(6) | st.integers(1, 6),
    max_result_chars=st.integers(16, 60),
)
def test_rows_hold_what_the_sampler_returned(
    family: str,
    style: Literal["hermes", "llama3_json", "pythonic"],
    loop: str,
    history: Literal["keep", "branch"],
    turns: Sequence[Turn],
    answers: Sequence[str],
    limit: int,
    context: int,
    max_turns: int,
    max_result_chars: int,
) -> None:
    config = replace(CONFIG, loop=loop, tool_format=style, history=history)
    config = replace(config, max_turns=max_turns, max_result_chars=max_result_chars)
    script = [turn.write(style) for turn in turns] * GROUP * NUM_PROMPTS * max_turns
    sampler = FakeSampler(TOKENIZERS[family], script, max_context_tokens=context)
    prompts = _prompts(answers)
    batch = _roll_out(config, prompts, sampler, limit=limit)
    requests_of = [_requests_of(sampler, prompts, row) for row in range(len(batch))]
    assert sum(map(len, requests_of)) == len(sampler.requests)
    for row, requests in enumerate(requests_of):
        prompt = prompts.token_ids_PL.unbind()[row // GROUP].tolist()
        num_sequences = _assert_as_sampled(batch, row, prompt, requests)
        assert history == "branch" or num_sequences == 1
        assert len(requests) <= max_turns
        for request in requests:
            length = len(request.context) + len(request.sample.token_ids)
            assert length <= min(len(prompt) + limit, context)
