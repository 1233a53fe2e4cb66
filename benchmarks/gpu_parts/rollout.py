"""Tokens a second of our rollouts, beside SGLang alone on the same requests.

As a module of its own, it is SGLang alone: prints tokens a second as JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Rank, Setup
from benchmarks.sides.measure import ROOT
from benchmarks.sides.one_rank import sampling_of
from hybridrl.workers.rollout.single_turn import single_turn

_REPEATS = 3
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
                responses = engine.run(single_turn(prompts, sampling_of(rank.config)))
                seconds = time.perf_counter() - begin
            rates.append(sum(len(r.token_ids) for r in responses) / seconds)
    ours = statistics.median(rates[1:])
    bench.record.figure("tokens_per_s", ours, "tokens/s")
    if alone is not None:
        bench.record.figure("share_of_sglang", ours / alone, "1")


def _alone(bench: Bench) -> float | None:
    """Return tokens a second of SGLang's own engine with log-probs, the faster of two ways."""
    if bench.engine != "sglang" or not bench.on_cuda:
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
    command = [sys.executable, "-m", "benchmarks.gpu_parts.rollout", json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"SGLang alone ended with {done.returncode}: {done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for name, rate in found.items():
        bench.record.figure(f"alone_{name}_tokens_per_s", rate, "tokens/s")
    return max(rate for name, rate in found.items() if name != "without_logprobs")


def main() -> None:
    order = json.loads(sys.argv[1])
    engine = import_module("sglang").Engine(
        model_path=order["model_path"],
        mem_fraction_static=order["mem_fraction_static"],
        max_running_requests=order["max_running_requests"],
        context_length=order["prompt_tokens"] + order["response_tokens"] + 8,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        log_level="error",
        **order["engine_args"],
    )
    ways = {"by_n": (True, True), "repeated": (False, True), "without_logprobs": (True, False)}
    try:
        rates = {
            name: _rate(engine, order, by_n=by_n, logprobs=logprobs)
            for name, (by_n, logprobs) in ways.items()
        }
    finally:
        engine.shutdown()
    print(json.dumps(rates), flush=True)


def _rate(engine: Any, order: dict[str, Any], *, by_n: bool, logprobs: bool) -> float:  # noqa: ANN401
    rates = []
    for number in range(_REPEATS):
        drawn = random.Random(f"{number} {by_n} {logprobs}")
        prompts = [
            [drawn.randrange(3, 250) for _ in range(order["prompt_tokens"])]
            for _ in range(order["num_prompts"])
        ]
        length = order["response_tokens"]
        sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
        if by_n:
            sampling["n"] = order["group_size"]
        else:
            prompts = [prompt for prompt in prompts for _ in range(order["group_size"])]
        begin = time.perf_counter()
        answers = engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=logprobs
        )
        seconds = time.perf_counter() - begin
        num_tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        rates.append(num_tokens / seconds)
    return statistics.median(rates[1:])


if __name__ == "__main__":
    main()
