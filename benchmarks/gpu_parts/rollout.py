"""Tokens a second of our rollouts, beside SGLang alone on the same requests."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Rank, Setup
from hybridrl.workers.rollout.single_turn import single_turn

_ROOT = Path(__file__).resolve().parents[2]
_SETUP = Setup(
    shape="qwen2.5-7b",
    masters="bfloat16",
    memory_fraction=0.7,
    num_prompts=64,
    group_size=8,
    prompt_tokens=256,
    response_tokens=128,
)


def run(bench: Bench) -> None:
    """SGLang alone first, on an empty device; then ours."""
    alone = _alone(bench)
    with Rank(bench, _SETUP) as rank:
        rates = []
        for number in range(bench.size(3, dry=2)):
            prompts = rank.prompts(rank.setup.num_prompts, seed=10 + number)
            with rank.worker.sharding.rollout_phase() as engine:
                assert engine is not None
                begin = time.perf_counter()
                responses = engine.run(single_turn(prompts, rank.sampling()))
                seconds = time.perf_counter() - begin
            rates.append(sum(len(r.token_ids) for r in responses) / seconds)
    ours = statistics.median(rates[1:])
    bench.record.figure("tokens_per_s", ours, "tokens/s")
    if alone is not None:
        bench.record.figure("share_of_sglang", ours / alone, "1")


def _alone(bench: Bench) -> float | None:
    """Return tokens a second of SGLang's own engine with log-probs, the faster of two ways."""
    if bench.engine != "sglang" or bench.device.type != "cuda":
        bench.record.not_exercised("SGLang alone: its own engine needs a device here")
        return None
    order = {
        "model_path": str(bench.model(_SETUP.shape)),
        "mem_fraction_static": _SETUP.memory_fraction,
        "num_prompts": _SETUP.num_prompts,
        "group_size": _SETUP.group_size,
        "prompt_tokens": _SETUP.prompt_tokens,
        "response_tokens": _SETUP.response_tokens,
        "max_running_requests": _SETUP.num_prompts * _SETUP.group_size,
        "engine_args": dict(word.split("=", 1) for word in bench.engine_args),
    }
    command = [sys.executable, "-m", "benchmarks.gpu_parts.sglang_alone", json.dumps(order)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"SGLang alone ended with {done.returncode}: {done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for name, rate in found.items():
        bench.record.figure(f"alone_{name}_tokens_per_s", rate, "tokens/s")
    return max(rate for name, rate in found.items() if name != "without_logprobs")
