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
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.sides.measure import ROOT, in_turns, print_head, print_row
from hybridrl.batch import PromptBatch, jagged
from hybridrl.config.rollout import RolloutConfig
from hybridrl.sampler import SamplingParams
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn

_VOCAB_SIZE = 512
_NUM_PROMPTS = 16
_GROUP_SIZE = 8
_MAX_PROMPT_TOKENS = 24
_MAX_RESPONSE_TOKENS = 24

# One token in twenty stops: like a task whose answers are half as long as the limit.
_STOPS: dict[str, tuple[int, ...]] = {
    "all responses full length": (),
    "stop tokens, mean length about half": tuple(range(0, _VOCAB_SIZE, 20)),
}


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


def make_engine(
    folder: Path, model: PreTrainedModel, num_slots: int, *, max_context_tokens: int = 48
) -> HFRolloutEngine:
    settings = yaml.safe_load((ROOT / "hydra_configs/rollout/hf.yaml").read_text())
    engine = HFRolloutEngine(
        folder,
        config=RolloutConfig(**settings | {"num_slots": num_slots, "dtype": "float32"}),
        max_context_tokens=max_context_tokens,
        device=torch.device("cpu"),
    )
    engine.load(engine.stage(list(model.named_parameters())), [])
    engine.finish_update(version=0)
    return engine


def make_prompts() -> PromptBatch:
    """Draw prompts of 4 to 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, _MAX_PROMPT_TOKENS + 1, (_NUM_PROMPTS,), generator=generator)
    rows = [
        torch.randint(1, _VOCAB_SIZE, (int(length),), generator=generator) for length in lengths
    ]
    indices = torch.arange(_NUM_PROMPTS)
    return PromptBatch(
        token_ids_PL=jagged(rows), prompt_index_P=indices, seed_P=indices, batch_size=[_NUM_PROMPTS]
    )


def run_engine(engine: HFRolloutEngine, prompts: PromptBatch, stops: tuple[int, ...]) -> int:
    """Sample; returns the number of response tokens."""
    sampling = SamplingParams(
        num_responses_per_prompt=_GROUP_SIZE,
        max_response_tokens=_MAX_RESPONSE_TOKENS,
        temperature=1.0,
        stop_token_ids=stops,
    )
    responses = engine.run(single_turn(prompts, sampling))
    return sum(len(response.token_ids) for response in responses)


def run_generate(model: PreTrainedModel, prompts: PromptBatch, stops: tuple[int, ...]) -> int:
    """Do the same by transformers: padded on the left, all rows until the last has ended."""
    reversed_rows = [row.flip(0) for row in prompts.token_ids_PL.unbind()]
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
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )
    new_tokens = output[:, padded.shape[1] :]
    is_stop = torch.isin(new_tokens, torch.tensor(stops, dtype=torch.int64))
    return int((is_stop.cumsum(1) - is_stop.long() == 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each way")
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 32], help="num_slots to try")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    prompts, rounds = make_prompts(), arguments.rounds
    print(f"{torch.get_num_threads()} thread(s), medians of {rounds} alternating rounds\n")
    head = ("workload", "way", "seconds", "response tokens", "tokens/s", "generate / this")
    print_head(*head, num_texts=6)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        samplers: dict[str, Callable[[PromptBatch, tuple[int, ...]], int]] = {
            "transformers generate": partial(run_generate, model)
        }
        for slots in arguments.slots:
            engine = make_engine(Path(folder), model, slots)
            samplers[f"engine, {slots} slots"] = partial(run_engine, engine)
    for workload, stops in _STOPS.items():
        tokens: dict[str, list[int]] = defaultdict(list)

        def sample(name: str, stops: tuple[int, ...], tokens: dict[str, list[int]]) -> None:
            tokens[name].append(samplers[name](prompts, stops))

        ways = {name: partial(sample, name, stops, tokens) for name in samplers}
        taken = in_turns(ways, rounds, num_warmup=2)
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        for name, seconds in medians.items():
            drawn = statistics.median(tokens[name][2:])
            ratio = medians["transformers generate"] / seconds
            rates = (f"{seconds:.3f}", f"{drawn:.0f}", f"{drawn / seconds:,.0f}", f"{ratio:.2f}")
            print_row(workload, name, *rates)


if __name__ == "__main__":
    main()
