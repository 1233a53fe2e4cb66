"""What conversations with rewritten histories cost an update, with and without a tree of tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.prefix_tree [--rounds 5]

Eight siblings hold a conversation of some turns with a tool. A turn is a thought, an answer and the
result of the tool; chat templates such as Qwen3's leave thoughts out of later contexts, so that
each turn is a sequence of its own. Without the tree each computes its context anew, but for prompts
that are equal. Prints a table in Markdown: tokens of all sequences, computed tokens, seconds of the
processor in an update on FSDP2 (one rank, one thread, float32, both ways in turns), and by how much
the process grows in an update whose micro-batches are one conversation each.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.sides.measure import print_head, print_row
from hybridrl.batch import TrainBatch, jagged_from
from hybridrl.workers.train import prefix_tree
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR, build_fsdp2, update

_CONFIG = replace(ACTOR, max_tokens_per_microbatch=8192)
_SIZES = {
    "hidden_size": 256,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
}
_PROMPT, _THOUGHT, _ANSWER, _RESULT = 160, 120, 40, 60
_CASES = {
    "thoughts are left out": (0, True),
    "and siblings have the same first half": (2, True),
    "nothing is rewritten": (0, False),
}
"""By name: one in how many turns the siblings have in common; whether thoughts are left out."""

_WAYS = ("apart", "tree")
_run = partial(run_ranks, deadline_s=3600.0)


def draw(num_turns: int, *, shares: int, rewrites: bool) -> tuple[TrainBatch, TrainBatch]:
    """Draw eight conversations; return them with a row for each sequence, and as they are."""
    generator = torch.Generator().manual_seed(0)

    def words(size: int) -> Tensor:
        return torch.randint(0, 2048, (size,), generator=generator)

    prompt, common = words(_PROMPT), dict[int, tuple[Tensor, ...]]()
    sequences, masks = [], []
    for _ in range(8):
        context, is_sampled = prompt, torch.zeros(_PROMPT, dtype=torch.bool)
        for turn in range(num_turns):
            sizes = (_THOUGHT, _ANSWER, _RESULT)
            thought, answer, result = drawn = tuple(map(words, sizes))
            if shares and turn < num_turns // shares:
                thought, answer, result = common.setdefault(turn, drawn)
            whole = torch.cat([context, thought, answer])
            mask = torch.cat([is_sampled, torch.ones(_THOUGHT + _ANSWER, dtype=torch.bool)])
            if rewrites or turn == num_turns - 1:
                sequences.append(whole)
                masks.append(mask)
            context = torch.cat([context, answer, result] if rewrites else [whole, result])
            no = torch.zeros(_RESULT, dtype=torch.bool)
            is_sampled = torch.zeros(len(context)).bool() if rewrites else torch.cat([mask, no])
    lengths_R = torch.tensor(list(map(len, sequences)))
    tokens_N, mask_N = torch.cat(sequences), torch.cat(masks)
    together = _batch(tokens_N, mask_N, lengths_R.view(8, -1).sum(1))
    together.sequence_lengths_BQ = jagged_from(lengths_R, torch.full((8,), len(lengths_R) // 8))
    return _batch(tokens_N, mask_N, lengths_R), together


def _batch(tokens_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> TrainBatch:
    return TrainBatch(
        token_ids_BL=jagged_from(tokens_N, lengths_B),
        response_mask_BL=jagged_from(mask_N, lengths_B),
        advantages_BL=jagged_from(mask_N.float(), lengths_B),
        sampler_logprobs_BL=jagged_from(-8.0 * mask_N, lengths_B),
        batch_size=[len(lengths_B)],
    )


def measure(_rank: int, folder: Path, batches: dict[str, TrainBatch], rounds: int) -> list[float]:
    """Return for each way its median seconds and the tokens that it computed."""
    torch.set_num_threads(1)
    engine = build_fsdp2(folder, config=_CONFIG)
    tokens = {}

    def learn(way: str) -> None:
        # What was computed before there was a tree: equal prompts alone are shared.
        least = prefix_tree._LEAST_TOKENS if way == "tree" else 2**62
        with patch.object(prefix_tree, "_LEAST_TOKENS", least):
            tokens[way] = update(engine, batches[way])["data/train_tokens"]

    seconds: dict[str, list[float]] = {way: [] for way in batches}
    for _ in range(1 + rounds):
        for way in batches:
            began = time.process_time()
            learn(way)
            seconds[way].append(time.process_time() - began)
    return [n for way in batches for n in (statistics.median(seconds[way][1:]), tokens[way])]


def grow(_rank: int, folder: Path, together: TrainBatch, way: str) -> float:
    """Return by how many MiB the process grows in an update, one conversation after the other."""
    torch.set_num_threads(1)
    engine = build_fsdp2(folder, config=replace(_CONFIG, max_tokens_per_microbatch=1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = prefix_tree._count_shared if way == "tree" else lambda *_: 0
    with patch.object(prefix_tree, "_count_shared", count):
        update(engine, together)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    print_head("conversations", "turns", "tokens", "computed", "s", "ratio", "MiB", num_texts=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(Path(scratch) / "model", **_SIZES)  # type: ignore[arg-type]
        for name, (shares, rewrites) in _CASES.items():
            for turns in options.turns:
                drawn = draw(turns, shares=shares, rewrites=rewrites)
                batches = dict(zip(_WAYS, drawn, strict=True))
                found = _run(1, measure, folder, batches, options.rounds)[0]
                apart_s, apart, tree_s, tree = found
                mib = [_run(1, grow, folder, drawn[1], way)[0] for way in _WAYS]
                print_row(
                    *(name, turns, len(drawn[0].token_ids_BL.values())),
                    *(f"{apart:.0f}, {tree:.0f}", f"{apart_s:.2f}, {tree_s:.2f}"),
                    *(f"{apart_s / tree_s:.2f}", f"{mib[0]:.0f}, {mib[1]:.0f}"),
                )


if __name__ == "__main__":
    main()
