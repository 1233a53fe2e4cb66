"""What a rollout of the default task costs, beside ``generate`` of transformers doing the same.

Prints a table in Markdown: 16 prompts of 4 to 24 tokens, 8 samples each, at most 24 new tokens, on
the default model's shape with random weights. Both ways alternate within one run, so that a busy
machine slows both. ``generate`` returns no log-probs; the engine does.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from hybridrl.batch import PromptBatch, jagged
from hybridrl.config.rollout import RolloutConfig
from hybridrl.sampler import SamplingParams
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn

_ROLLOUT_CONFIG = Path(__file__).parents[1] / "hydra_configs/rollout/hf.yaml"
_VOCAB_SIZE = 512
_NUM_PROMPTS = 16
_GROUP_SIZE = 8
_MAX_PROMPT_TOKENS = 24
_MAX_RESPONSE_TOKENS = 24


@dataclass(frozen=True)
class Workload:
    """What ends a response."""

    name: str
    stop_token_ids: tuple[int, ...]


# One token in twenty stops: like a task whose answers are half as long as the limit.
_WORKLOADS = (
    Workload("all responses full length", ()),
    Workload("stop tokens, mean length about half", tuple(range(0, _VOCAB_SIZE, 20))),
)


def make_model(folder: Path) -> PreTrainedModel:
    """Save the default model's shape with random weights, and return it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def make_engine(folder: Path, model: PreTrainedModel, num_slots: int) -> HFRolloutEngine:
    """An engine with the model's weights."""
    settings = yaml.safe_load(_ROLLOUT_CONFIG.read_text())
    config = RolloutConfig(**(settings | {"num_slots": num_slots, "dtype": "float32"}))
    engine = HFRolloutEngine(
        folder,
        config=config,
        max_context_tokens=_MAX_PROMPT_TOKENS + _MAX_RESPONSE_TOKENS,
        device=torch.device("cpu"),
    )
    engine.load(engine.stage(list(model.named_parameters())), [])
    engine.finish_update(version=0)
    return engine


def make_prompts() -> PromptBatch:
    """Prompts of 4 to 24 random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, _MAX_PROMPT_TOKENS + 1, (_NUM_PROMPTS,), generator=generator)
    rows = [
        torch.randint(1, _VOCAB_SIZE, (int(length),), generator=generator) for length in lengths
    ]
    return PromptBatch(
        token_ids_PL=jagged(rows),
        prompt_index_P=torch.arange(_NUM_PROMPTS),
        seed_P=torch.arange(_NUM_PROMPTS),
        batch_size=[_NUM_PROMPTS],
    )


def run_engine(engine: HFRolloutEngine, prompts: PromptBatch, workload: Workload) -> int:
    """Sample; returns the number of response tokens."""
    responses = engine.run(
        single_turn(
            prompts,
            SamplingParams(
                num_responses_per_prompt=_GROUP_SIZE,
                max_response_tokens=_MAX_RESPONSE_TOKENS,
                temperature=1.0,
                stop_token_ids=workload.stop_token_ids,
            ),
        )
    )
    return sum(len(response.token_ids) for response in responses)


def run_generate(model: PreTrainedModel, prompts: PromptBatch, workload: Workload) -> int:
    """The same by transformers: padded on the left, all rows until the last has ended."""
    rows = prompts.token_ids_PL.unbind()
    reversed_rows = [row.flip(0) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(reversed_rows, batch_first=True).flip(1)
    output = model.generate(
        padded,
        attention_mask=(padded != 0).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=_GROUP_SIZE,
        max_new_tokens=_MAX_RESPONSE_TOKENS,
        eos_token_id=list(workload.stop_token_ids) or None,
        pad_token_id=0,
    )
    new_tokens = output[:, padded.shape[1] :]
    is_stop = torch.isin(new_tokens, torch.tensor(workload.stop_token_ids, dtype=torch.int64))
    return int((is_stop.cumsum(1) - is_stop.long() == 0).sum())


def alternate(ways: list[Callable[[], int]], num_rounds: int) -> list[tuple[float, float]]:
    """Time the ways in turn; returns median seconds and median response tokens of each."""
    seconds: list[list[float]] = [[] for _ in ways]
    tokens: list[list[int]] = [[] for _ in ways]
    for timed in [False, False] + [True] * num_rounds:
        for place, way in enumerate(ways):
            began = time.perf_counter()
            num_tokens = way()
            if timed:
                seconds[place].append(time.perf_counter() - began)
                tokens[place].append(num_tokens)
    return [
        (statistics.median(spent), statistics.median(drawn))
        for spent, drawn in zip(seconds, tokens, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each way")
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 32], help="num_slots to try")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    prompts = make_prompts()
    print(
        f"{torch.get_num_threads()} thread(s), medians of {arguments.rounds} alternating rounds\n"
    )
    print("| workload | way | seconds | response tokens | tokens/s | generate / this |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        engines = [make_engine(Path(folder), model, slots) for slots in arguments.slots]
    names = ["transformers generate"] + [f"engine, {slots} slots" for slots in arguments.slots]
    for workload in _WORKLOADS:
        ways: list[Callable[[], int]] = [partial(run_generate, model, prompts, workload)]
        ways += [partial(run_engine, engine, prompts, workload) for engine in engines]
        results = alternate(ways, arguments.rounds)
        for name, (seconds, tokens) in zip(names, results, strict=True):
            print(
                f"| {workload.name} | {name} | {seconds:.3f} | {tokens:.0f} | "
                f"{tokens / seconds:,.0f} | {results[0][0] / seconds:.2f} |"
            )


if __name__ == "__main__":
    main()
