"""Scoring by a pool of reward processes against a single one: prints a Markdown table.

python -m benchmarks.rewards

Math needs math-verify and code a sandbox; a line that this machine cannot run gives the reason.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

from hybridrl.config.reward import RewardConfig
from hybridrl.errors import SandboxError
from hybridrl.processes.sandbox import Sandbox, SandboxLimits
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--math-rows", type=int, default=1024)
    parser.add_argument("--code-rows", type=int, default=256)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.processes} processes against one, {options.repeats} pairs of runs\n")
    print("| what | one, median s | pool, median s | ratio, median of pairs |\n|---|---|---|---|")
    for function, num_rows, rows_of, obstacle in (
        ("math", options.math_rows, math_rows, obstacle_to_math()),
        ("code", options.code_rows, code_rows, obstacle_to_code()),
    ):
        if obstacle:
            print(f"| {function}, {num_rows} answers | {obstacle} | | |")
            continue
        rows = rows_of(num_rows)
        one_s, pool_s = compare(function, rows, options.processes, options.repeats)
        ratio = statistics.median(a / b for a, b in zip(one_s, pool_s, strict=True))
        one, pool = statistics.median(one_s), statistics.median(pool_s)
        print(f"| {function}, {num_rows} answers | {one:.2f} | {pool:.2f} | {ratio:.2f} |")


def compare(
    function: str, rows: RewardInputs, num_processes: int, num_repeats: int
) -> tuple[list[float], list[float]]:
    """Return seconds of each run by one process, and by the pool, in turn."""
    with scorer_of(function, 1) as one, scorer_of(function, num_processes) as pool:
        seconds: tuple[list[float], list[float]] = ([], [])
        for scorer in (one, pool):  # imports, caches
            scores = scorer.score(rows)
            if scores.is_failed_B.any() or not 0.0 < float(scores.rewards_B.mean()) < 1.0:
                raise RuntimeError(f"{function} scored {scores}")
        for _ in range(num_repeats):
            for scorer, taken in zip((one, pool), seconds, strict=True):
                began = time.perf_counter()
                scorer.score(rows)
                taken.append(time.perf_counter() - began)
        return seconds


def scorer_of(function: str, num_processes: int) -> RewardScorer:
    return RewardScorer(
        RewardConfig(
            function=function,
            args={},
            functions={},
            num_processes=num_processes,
            timeout_s=60.0,
            on_error="zero",
        )
    )


def math_rows(num_rows: int) -> RewardInputs:
    source = random.Random(0)

    def row() -> tuple[str, str]:
        above, below = source.randrange(1, 99), source.randrange(2, 99)
        wrong = source.randrange(2)
        boxed = f"\\boxed{{\\frac{{{above}}}{{{below}}}}}"
        return (
            f"First I simplify, then $x = {above}/{below}$. So {boxed}",
            f"\\frac{{{2 * above + wrong}}}{{{2 * below}}}",
        )

    return inputs_of(row, num_rows)


def code_rows(num_rows: int) -> RewardInputs:
    source = random.Random(0)

    def row() -> tuple[str, str]:
        a, b = source.randrange(1000), source.randrange(1000)
        sign = source.choice("+-")
        code = f"a, b = map(int, input().split())\nprint(a {sign} b)"
        return f"```python\n{code}\n```", f'[{{"stdin": "{a} {b}", "stdout": "{a + b}"}}]'

    return inputs_of(row, num_rows)


def inputs_of(row: Callable[[], tuple[str, str]], num_rows: int) -> RewardInputs:
    responses, answers = zip(*(row() for _ in range(num_rows)), strict=True)
    return RewardInputs(
        responses=list(responses),
        answers=list(answers),
        prompts=[str(number) for number in range(num_rows)],
        sources=[""] * num_rows,
        lengths=[1] * num_rows,
    )


def obstacle_to_math() -> str:
    return "" if find_spec("math_verify") else "math-verify is not installed"


def obstacle_to_code() -> str:
    try:
        Sandbox(SandboxLimits()).check()
    except SandboxError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
