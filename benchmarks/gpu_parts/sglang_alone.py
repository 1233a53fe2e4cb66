"""SGLang's own engine on the requests of the part ``rollout``; prints tokens a second as JSON."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

import sglang

_REPEATS = 3


def main() -> None:
    """Measure two ways of asking for a group, and one without log-probs."""
    order = json.loads(sys.argv[1])
    engine = sglang.Engine(
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
        sampling = {
            "temperature": 1.0,
            "max_new_tokens": order["response_tokens"],
            "ignore_eos": True,
        }
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
