"""256 conversations at the same time with slow tools, against the ideal: prints a Markdown table.

Each conversation samples turns of random lengths on the embedded engine, and waits for an
asynchronous tool behind each but the last. The ideal is the larger of two numbers: the longest
chain (turns and tools of one conversation that has the engine to itself), and the work (each
conversation as one single-turn request: its appended tokens are the prompt, its sampled tokens the
response; so the engine does the same work at full slots, and nothing waits). The models have the
default depth and random weights, and are as wide as the default model or several times as wide.

    OMP_NUM_THREADS=1 python -m benchmarks.agents
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rollout import make_engine
from benchmarks.sides.measure import ROOT, print_head, print_row, seconds_of
from hybridrl.agents.conversation import Conversation
from hybridrl.agents.rollout import AgentRollout
from hybridrl.agents.tool_calls import ToolCall
from hybridrl.batch import PromptBatch, jagged
from hybridrl.config.agent import AgentConfig
from hybridrl.config.model import StarterConfig
from hybridrl.data.prompts import encode_row
from hybridrl.data.rows import Message, Row
from hybridrl.images import Images
from hybridrl.run.starter import write_random_model
from hybridrl.sampler import RequestParams, Sample, Sampler, SamplingParams

_CONFIGS = ROOT / "hydra_configs"
_NUM_TURNS = 4
_PROMPT_TOKENS, _MAX_TOKENS = 16, 240
_STOPS = tuple(range(0, 512, 16))
"""One token in sixteen ends a turn."""


class WaitsForTools:
    """Asks for a tool that takes random time behind each turn but the last."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        """Take the seconds of each call from the answer of the row."""
        for seconds in map(float, conversation.row.answer.split()):
            await conversation.sample()
            await conversation.call(ToolCall("wait", {"seconds": seconds}))
            conversation.append([Message("tool", "done")])
        await conversation.sample()


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long
    """
    await asyncio.sleep(seconds)
    return "done"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    context: Tensor
    sample: Sample

    @property
    def num_tokens(self) -> int:
        return len(self.context) + len(self.sample.token_ids)


@dataclass
class Recorder:
    """A sampler that keeps what another one answered."""

    sampler: Sampler
    turns: list[Turn] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.sampler, name)

    async def sample(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        key: int,
        images: Images = (),
    ) -> Sample:
        sample = await self.sampler.sample(token_ids, params, key=key, images=images)
        self.turns.append(Turn(torch.as_tensor(token_ids), sample))
        return sample


class Bench:
    """An engine, and the conversations that it holds."""

    def __init__(self, folder: Path, *, num_slots: int, scale: int) -> None:
        """Build the engine, with random weights: ``scale`` times as wide as the default."""
        starter = yaml.safe_load((_CONFIGS / "model/starter.yaml").read_text())["starter"]
        starter["hidden_size"] *= scale
        write_random_model(StarterConfig(**starter), folder, seed=0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        self.num_parameters: int = model.num_parameters()
        size = _PROMPT_TOKENS + _MAX_TOKENS
        self._engine = make_engine(folder, model, num_slots, max_context_tokens=size)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._sampling = SamplingParams(
            num_responses_per_prompt=1,
            max_response_tokens=_MAX_TOKENS,
            temperature=1.0,
            stop_token_ids=_STOPS,
        )

    def hold(self, waits: Sequence[Sequence[float]]) -> tuple[float, list[Turn]]:
        """Hold one conversation for each list of seconds; returns seconds and all turns."""
        agent = yaml.safe_load((_CONFIGS / "agent/tool_calls.yaml").read_text())
        config = AgentConfig(**agent | {"tools": (f"{__file__}:wait",)})
        config = replace(config, loop=f"{__file__}:WaitsForTools", num_conversations=len(waits))
        rollout = AgentRollout(
            config,
            self._tokenizer,
            stop_token_ids=(self._tokenizer.eos_token_id,),
            max_prompt_tokens=_MAX_TOKENS,
        )
        program = rollout.program(_prompts(waits), self._sampling)
        recorders = []

        async def recorded(sampler: Sampler) -> list[Sample]:
            recorders.append(Recorder(sampler))
            return await program(cast(Sampler, recorders[0]))

        seconds = seconds_of(lambda: self._engine.run(recorded))
        rollout.close()
        return seconds, recorders[0].turns

    def sample_at_once(self, turns: Sequence[Turn]) -> float:
        """Sample as many tokens of each conversation, behind as many tokens that it appended."""
        conversations: dict[tuple[int, ...], list[Turn]] = {}
        for turn in turns:
            conversations.setdefault(tuple(turn.context[:_PROMPT_TOKENS].tolist()), []).append(turn)
        lengths = [
            (
                max(each, key=lambda turn: turn.num_tokens),
                sum(len(t.sample.token_ids) for t in each),
            )
            for each in conversations.values()
        ]

        async def program(sampler: Sampler) -> list[Sample]:
            params = RequestParams(max_new_tokens=1, temperature=1.0)
            requests = [
                sampler.sample(
                    last.context[: last.num_tokens - num_sampled],
                    replace(params, max_new_tokens=num_sampled),
                    key=number,
                )
                for number, (last, num_sampled) in enumerate(lengths)
            ]
            return await asyncio.gather(*requests)

        return seconds_of(lambda: self._engine.run(program))


def _prompts(waits: Sequence[Sequence[float]]) -> PromptBatch:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 256, (len(waits), _PROMPT_TOKENS), generator=generator)
    answers = [" ".join(map(str, seconds)) for seconds in waits]
    rows = [Row(prompt="", answer=answer, source="", origin="") for answer in answers]
    return PromptBatch(
        token_ids_PL=jagged(list(prompts)),
        prompt_index_P=torch.arange(len(waits)),
        seed_P=torch.arange(len(waits)),
        row_PN=jagged([encode_row(row) for row in rows]),
        batch_size=[len(waits)],
    )


def draw_waits(num_conversations: int, mean_s: float) -> list[list[float]]:
    """Draw the seconds of all calls: exponential, ten times the mean at most."""
    source = random.Random(0)
    return [
        [min(source.expovariate(1.0), 10.0) * mean_s for _ in range(_NUM_TURNS - 1)]
        for _ in range(num_conversations)
    ]


def measure(bench: Bench, num_conversations: int, mean_s: float, rounds: int) -> None:
    waits = draw_waits(num_conversations, mean_s)
    longest = max(waits, key=sum)
    seconds: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        wall_s, turns = bench.hold(waits)
        alone_s, _ = bench.hold([longest])
        seconds.append((wall_s, alone_s, bench.sample_at_once(turns)))
    wall_s, chain_s, work_s = map(statistics.median, zip(*seconds, strict=True))
    ratio = statistics.median(wall / max(ideal) for wall, *ideal in seconds)
    num_tokens = sum(len(turn.sample.token_ids) for turn in turns)
    print_row(
        *(f"{bench.num_parameters / 1e6:.1f}", f"{mean_s:g}", len(turns), num_tokens),
        *(f"{value:.2f}" for value in (wall_s, chain_s, work_s, ratio)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.conversations} conversations of {_NUM_TURNS} turns, {options.slots} slots.\n")
    print_head(
        *("million parameters", "a call, mean s", "turns", "sampled tokens"),
        *("s", "longest chain, s", "work, s", "ratio"),
        num_texts=8,
    )
    for scale in options.scales:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), num_slots=options.slots, scale=scale)
            bench.hold(draw_waits(options.conversations, 0.0))  # warms up
            for mean_s in options.waits:
                measure(bench, options.conversations, mean_s, options.rounds)


if __name__ == "__main__":
    main()
