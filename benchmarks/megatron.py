"""megatron-core beside FSDP2 on CPUs: an update, a scoring, and the way of weights to the engine.

    python -m benchmarks.megatron [--rounds 7]

The same model, rows and number of ranks, one thread a rank; both engines live in the same ranks and
take turns, update for update, so that both meet the same noise. megatron-core runs over gloo with
the tests' stand-ins for ``torch.cuda``. Nothing here says anything about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.sides.measure import print_head, print_row, seconds_of
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.config.values import config_of
from tests.megatron.stand_ins import install
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL, make_rows, rows_of, to_rollouts, update

_CASES: tuple[tuple[str, int, Mapping[str, int]], ...] = (
    ("1 rank", 1, {}),
    ("2 ranks, data-parallel", 2, {}),
    ("2 ranks, tensor-parallel", 2, {"tensor_parallel_size": 2}),
    ("2 ranks, context-parallel", 2, {"context_parallel_size": 2}),
)
_SIZES = {
    "hidden_size": 256,
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "initializer_range": 0.02,
}
_CONFIG = replace(ACTOR, max_tokens_per_microbatch=2048)

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", type=int, default=len(_CASES), help="run the first so many")
    options = parser.parse_args()
    print_head(
        *("ranks", "update, s: FSDP2, megatron", "ratio", "scoring, s", "ratio", "export, GB/s"),
        "copy",
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(Path(scratch) / "model", **_SIZES)  # type: ignore[arg-type]
        for name, num_ranks, sizes in _CASES[: options.cases]:
            times = run_ranks(num_ranks, _measure, folder, dict(sizes), options.rounds)[0]
            print_row(name, *_cells(times))


def _cells(times: Times) -> list[str]:
    cells = []
    for what in ("update", "score"):
        mine, theirs = (statistics.median(times[f"{what} {e}"]) for e in ("megatron", "fsdp2"))
        cells += [f"{theirs:.3f}, {mine:.3f}", f"{mine / theirs:.2f}"]
    num_bytes = times["bytes"][0]
    speeds = [num_bytes / statistics.median(times[f"export {e}"]) / 1e9 for e in _ENGINES]
    cells.append(", ".join(f"{speed:.2f}" for speed in speeds))
    return [*cells, f"{num_bytes / statistics.median(times['copy']) / 1e9:.2f}"]


_ENGINES = ("fsdp2", "megatron")


def _measure(_rank: int, folder: Path, sizes: dict[str, int], rounds: int) -> Times:
    torch.set_num_threads(1)
    engines: dict[str, PolicyEngine] = {
        "fsdp2": PolicyEngine(
            FSDP2Backend(
                folder, config=_CONFIG, model_config=MODEL, num_total_steps=100, device=CPU
            )
        ),
        "megatron": _build_megatron(folder, sizes),
    }
    times: Times = {"bytes": [], "copy": []}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            found = _one_round(engine)
            if number:  # the first one warms up
                for what, seconds in found.items():
                    times.setdefault(f"{what} {name}", []).append(seconds)
        times["copy"].append(_copy(engines["fsdp2"]))
    times["bytes"] = [float(sum(s.num_bytes for s in engines["fsdp2"].weight_specs()))]
    return times


def _build_megatron(folder: Path, sizes: dict[str, int]) -> PolicyEngine:
    install()
    from hybridrl.workers.train.megatron.backend import MegatronBackend
    from hybridrl.workers.train.megatron.context import MegatronContext

    megatron = replace(config_of().megatron, **sizes)  # type: ignore[arg-type]
    context = MegatronContext(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0)
    config = replace(_CONFIG, engine="megatron")
    backend = MegatronBackend(folder, config=config, context=context, num_total_steps=100)
    return PolicyEngine(backend)


def _one_round(engine: PolicyEngine) -> dict[str, float]:
    """Time an update, a scoring and an export; ranks begin each together."""
    rows = make_rows(64, seed=1, num_siblings=8, max_half=40)
    mine = rows_of(rows, range(engine.dp_rank, len(rows), engine.dp_size))
    rollouts = to_rollouts(mine)
    return {
        "update": _seconds(lambda: update(engine, mine)),
        "score": _seconds(lambda: engine.compute_logprobs(rollouts, temperature=1.0)),
        "export": _seconds(lambda: [tensor for _, tensor in engine.full_weights()]),
    }


def _copy(engine: PolicyEngine) -> float:
    num_bytes = sum(spec.num_bytes for spec in engine.weight_specs())
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    return _seconds(lambda: target.copy_(source))


def _seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    return seconds_of(lambda: (action(), dist.barrier()))


if __name__ == "__main__":
    main()
