from __future__ import annotations

import asyncio
import re
import string
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridrl.agents.conversation import Agent, Conversation, Prompt, Setting, hold
from hybridrl.agents.rollout import ToolCalls
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_calls import Calls, ToolCall, ToolFormat
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.rows import Row
from hybridrl.sampler import RequestParams, Sampler
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import server_of

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CHARACTERS = [*string.ascii_lowercase, *string.digits, *"QM:+*.-", "Ġ"]
NUM_STOPS = 8  # of 64 tokens: a turn of the random model has some 8 tokens
NUM_TURNS = 3
ROW = Row(prompt="q", answer="42", source="s", origin="o")


def make_tokenizer() -> PreTrainedTokenizerBase:
    """One token a character, as many as the served model has."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )


TOKENIZER = make_tokenizer()


class CallsInEachTurn:
    """Reads a call in every turn but the last, because the model is random."""

    def __init__(self) -> None:
        self._num_turns = 0

    def __call__(self, _: str, tools: object) -> Calls:
        self._num_turns += 1
        is_last = self._num_turns % NUM_TURNS == 0
        return () if is_last else (ToolCall("calculator", {"expression": "6*7"}),)


class WritesOn:
    """Writes on in the turn, behind each of some characters."""

    appended_roles = ()

    async def run(self, conversation: Conversation) -> None:
        while (await conversation.sample(stops=[*"mnopq"]))[-1:] in [*"mnopq"]:
            conversation.append_text("Q42")


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    limits = ToolLimits(timeout_s=20.0, max_chars=40)
    box = Toolbox(load_tools(["calculator"]), limits=limits, num_processes=1)
    yield box
    box.close()


PROMPT = torch.arange(40, 10, -2)
STOPS = (TOKENIZER.eos_token_id, *range(NUM_STOPS - 1))


def hold_one(
    number: int,
    sampler: Sampler,
    toolbox: Toolbox,
    *,
    stops: tuple[int, ...] = STOPS,
    timeout_s: float = 60.0,
    agent: Agent | None = None,
) -> Coroutine[Any, Any, Trajectory]:
    setting = Setting(
        sampler=sampler,
        params=RequestParams(max_new_tokens=80, temperature=1.0, stop_token_ids=stops),
        max_prompt_tokens=len(PROMPT),
        tokenizer=TOKENIZER,
        template=TurnTemplate(TOKENIZER, stop_token_ids=(TOKENIZER.eos_token_id,)),
        toolbox=toolbox,
        tool_format=ToolFormat(CallsInEachTurn(), re.compile(r"\A")),
        max_turns=10 if agent else NUM_TURNS,
        timeout_s=timeout_s,
    )
    prompt = Prompt(
        row=ROW, token_ids=PROMPT, seed=number // 8, response_index=number % 8, number=number
    )
    return hold(agent or ToolCalls(), prompt, setting)


def test_conversations_are_trained_as_the_server_sampled_them(
    engine: SGLangEngine, served_model: Path, toolbox: Toolbox
) -> None:
    async def program(sampler: Sampler) -> list[Trajectory]:
        by_agent = (None, WritesOn())
        return await asyncio.gather(
            *(hold_one(n, sampler, toolbox, agent=by_agent[n >= 24]) for n in range(36))
        )

    trajectories = engine.run(program)
    assert {t.ended for t in trajectories} <= {"answer", "tokens", "turns"}
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories[24:])
    for trajectory in trajectories[24:]:
        ends = [int(t.token_ids[-1]) for t in trajectory.turns[:-1] if t.logprobs is not None]
        assert {CHARACTERS[token_id] for token_id in ends} <= {*"mnopq"}
    assert sum(t.num_sampled_turns for t in trajectories) > 2 * len(trajectories)
    model = AutoModelForCausalLM.from_pretrained(served_model)
    for trajectory in trajectories:
        sample = trajectory.to_sample()
        assert sample.weight_version == engine.version
        row = torch.cat([PROMPT, sample.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(row[None]).logits[0].float(), dim=-1)
        expected = scores[len(PROMPT) - 1 : -1].gather(1, sample.token_ids[:, None])[:, 0]
        assert sample.is_sampled is not None
        torch.testing.assert_close(sample.logprobs, expected * sample.is_sampled, atol=2e-4, rtol=0)
    hits = engine.take_metrics()["rollout/prefix_cache_hit_fraction"]
    # The prompt is prefilled once for all; of a later turn only the increment is.
    assert hits.value > 0.7


def num_decode_steps(engine: SGLangEngine) -> int:
    """Steps of a server so far. Its scheduler writes them down once a second while it is idle."""
    asked_at = time.time()
    while True:
        (load,) = server_of(engine).client.call("/v1/loads", timeout_s=10.0, method="GET")["loads"]
        if load["timestamp"] > asked_at:
            steps: int = load["decode_moments"][0]
            return steps
        time.sleep(0.1)


@pytest.mark.timeout(120)
def test_conversations_at_their_deadline_free_their_slots(
    engine: SGLangEngine, toolbox: Toolbox
) -> None:
    num_conversations, num_slots, num_tokens = 200, 8, 80

    async def program(sampler: Sampler) -> list[Trajectory]:
        work = (
            hold_one(number, sampler, toolbox, stops=(), timeout_s=0.5)
            for number in range(num_conversations)
        )
        held = await asyncio.gather(*work)
        await sampler.sample([1, 2], RequestParams(max_new_tokens=2, temperature=1.0), key=0)
        return held

    before = num_decode_steps(engine)
    ended = Counter(trajectory.ended for trajectory in engine.run(program))
    # A fast machine ends many in time: what the server did is compared with what these needed.
    for_the_others = ended["time"] * num_tokens // num_slots
    of_the_ended = (num_conversations - ended["time"]) * num_tokens // num_slots
    assert ended["time"] > num_conversations // 4
    assert num_decode_steps(engine) - before - of_the_ended < for_the_others // 2
