"""Rollout servers: skewed lengths, an engine that is killed, and thousands of engines.

Prints three tables in Markdown. The first two use two engines with the embedded engine, each in a
process of its own, and a model of the default shape with random weights. In the third one, engines
answer at once and have no process.

    OMP_NUM_THREADS=1 python -m benchmarks.serving [--picture docs/images/killed_engine.svg]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.sides.answering_engines import AnsweringEngine, Answers
from benchmarks.sides.timed_engine import TimedEngine
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.serving import ServedModelConfig, ServerGroupConfig, ServingConfig
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.starter import write_random_model
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.launching import ActorLaunch
from hybridrl.serving.plan import EnginePlan, GroupPlan, ModelPlan, lay_out, plan_servers
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.server import RolloutServer
from hybridrl.single_controller import RayResourcePool

_PROMPT = torch.arange(1, 9)
_GROUP_SIZE = 8
_NUM_PROMPTS, _NUM_LONG = 16, 2
_SHORT, _LONG = 12, 240
_BIN_S, _CURVE_S = 0.5, 4.0
_NUM_UPDATES = 6
_LIMIT_S, _RATIO = 3.0, 1.3


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each case of skewed lengths")
    parser.add_argument("--draws", type=int, default=4, help="random orders of skewed lengths")
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--requests", type=int, default=16_000, help="to simulated engines")
    parser.add_argument("--picture", type=Path, help="SVG of the killed engine to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    config = load_config(
        compose(
            [
                *("serving=own", f"rollout.num_slots={_GROUP_SIZE}", "tracking.trackers=[]"),
                *(f"rollout.max_response_tokens={_LONG}", "cluster.num_threads_per_rank=1"),
                "model.starter.max_position_embeddings=264",
                *options.overrides,
            ]
        )
    )
    simulated(config, options.engines, options.requests)
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        model_folder = Path(folder) / "model"
        if config.model.starter is None:
            parser.error("give no model.path: the model has random weights")
        write_random_model(config.model.starter, model_folder, seed=0)
        with ray_cluster(config.cluster, num_more_ranks=config.num_server_devices):
            skewed(config, model_folder, num_rounds=options.rounds, num_draws=options.draws)
            killed(config, model_folder, picture=options.picture)


# -- skewed lengths -----------------------------------------------------------------------------


def skewed(
    config: ExperimentConfig, model_folder: Path, *, num_rounds: int, num_draws: int
) -> None:
    """Print what handing out work as engines become free gains over a split in advance."""
    orders = {"side by side": [_LONG] * _NUM_LONG + [_SHORT] * (_NUM_PROMPTS - _NUM_LONG)}
    for draw in range(num_draws):
        lengths = orders["side by side"][:]
        random.Random(draw).shuffle(lengths)
        orders[f"drawn, seed {draw}"] = lengths
    print(
        f"\n{_NUM_PROMPTS} prompts x {_GROUP_SIZE} responses of {_SHORT} tokens, those to "
        f"{_NUM_LONG} prompts of {_LONG}; two engines, medians of {num_rounds} rounds (side by "
        f"side: at least {_RATIO}):\n"
    )
    print("| the long ones | halves, tokens/s | as engines become free, tokens/s | ratio |")
    print("|---|---:|---:|---:|")
    with served(config, model_folder) as (server, _):
        ways = {"halves": in_halves, "free": as_they_become_free}
        drawn = []
        for name, lengths in orders.items():
            tokens = _GROUP_SIZE * sum(lengths)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(num_rounds):
                for way, sample in ways.items():
                    seconds[way].append(timed(partial(sample, server, config, lengths)))
            halves, free = (tokens / statistics.median(seconds[way]) for way in ways)
            print(f"| {name} | {halves:,.0f} | {free:,.0f} | {free / halves:.2f} |")
            drawn += [free / halves] if name in list(orders)[1:] else []
    if drawn:
        print(f"\nmean ratio of the drawn orders: {statistics.fmean(drawn):.2f}")


def in_halves(server: RolloutServer, config: ExperimentConfig, lengths: Sequence[int]) -> None:
    """Sample the first half of the prompts with one engine, and the second one with the other."""
    half = len(lengths) // 2
    pools = [pool_of(server, config, {0: one}) for one in server.serving_engines().values()]
    asyncio.run(together(ask(pools[0], lengths[:half]), ask(pools[1], lengths[half:])))


def as_they_become_free(
    server: RolloutServer, config: ExperimentConfig, lengths: Sequence[int]
) -> None:
    """Sample all prompts with both engines."""
    asyncio.run(ask(pool_of(server, config, server.serving_engines()), lengths))


async def together(*work: Coroutine[Any, Any, object]) -> None:
    """Run all of it."""
    await asyncio.gather(*work)


async def ask(
    pool: EnginePool, lengths: Sequence[int], *, num_keys: int = _GROUP_SIZE
) -> list[list[Sample]]:
    """Sample a group of responses of each length."""
    requests = [RequestParams(max_new_tokens=length, temperature=1.0) for length in lengths]
    keys = range(num_keys)
    return await asyncio.gather(*(pool.sample_group(_PROMPT, one, keys=keys) for one in requests))


# -- a killed engine ----------------------------------------------------------------------------


def killed(config: ExperimentConfig, model_folder: Path, *, picture: Path | None) -> None:
    """Kill an engine while both sample, and print how long its replacement took."""
    with served(config, model_folder) as (server, engines):
        recovery = Recovery(server, health_timeout_s=config.serving.health_timeout_s)
        pool = pool_of(server, config, server.serving_engines())
        with recovery.filling(pool):
            died_s = asyncio.run(kill_one(pool, engines))
    new = engines[-1]
    noticed_s, start_s = new.launched_s - died_s, new.built_s - new.launched_s
    answer_s = new.answers[0][0] - new.built_s
    print("\nAn engine is killed; both sample without a break:\n\n| what | s |\n|---|---:|")
    print(f"| from its death to the start of its replacement | {noticed_s:.2f} |")
    print(f"| the engine's own start | {start_s:.2f} |")
    print(f"| from there to its first answer, with weights | {answer_s:.2f} |")
    print(f"| all but its own start (limit {_LIMIT_S:.0f}) | {noticed_s + answer_s:.2f} |")
    answers = sorted(answer for engine in engines for answer in engine.answers)
    began_s, ended_s = answers[0][0], answers[-1][0]
    print("\n| tokens/s | both | of one alone | with the replacement |\n|---|---:|---:|---:|")
    phases = ((began_s, died_s), (died_s, new.answers[0][0]), (new.answers[0][0], ended_s))
    rates = [
        sum(tokens for at_s, tokens in answers if begin < at_s <= end) / (end - begin)
        for begin, end in phases
    ]
    print(f"| all engines | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[2]:,.0f} |")
    if picture is not None:
        lines = {"killed": died_s - began_s, "replaced": new.answers[0][0] - began_s}
        moments = [(at_s - began_s, tokens) for at_s, tokens in answers]
        picture.write_text(draw(moments, lines), encoding="utf-8")


async def kill_one(
    pool: EnginePool, engines: Sequence[TimedEngine], *, for_s: float = 4.0
) -> float:
    """Sample without a break until a replacement has answered for a while; returns the death."""
    num_engines, is_over = len(engines), asyncio.Event()

    async def ask_again_and_again() -> None:
        while not is_over.is_set():
            await ask(pool, [4 * _SHORT])

    clients = [asyncio.ensure_future(ask_again_and_again()) for _ in range(2 * num_engines)]
    await asyncio.sleep(_CURVE_S)
    died_s = time.perf_counter()
    engines[0].end()
    while len(engines) == num_engines or not engines[-1].answers:
        await asyncio.sleep(0.05)
    await asyncio.sleep(_CURVE_S)
    is_over.set()
    await asyncio.gather(*clients)
    return died_s


def draw(moments: Sequence[tuple[float, int]], lines: dict[str, float]) -> str:
    """Return an SVG of tokens per second over time, with named moments."""
    width, height, margin = 760, 260, 40
    rates = [0.0] * (int(moments[-1][0] / _BIN_S) + 1)
    for at_s, tokens in moments:
        rates[int(at_s / _BIN_S)] += tokens / _BIN_S
    rates = rates[:-1] or rates  # the last one is not full
    per_s = (width - 2 * margin) / (_BIN_S * len(rates))
    per_rate = (height - 2 * margin) / max(rates)
    points = " ".join(
        f"{margin + (n + 0.5) * _BIN_S * per_s:.1f},{height - margin - rate * per_rate:.1f}"
        for n, rate in enumerate(rates)
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#57606a"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline fill="none" stroke="#4051b5" stroke-width="2.5" points="{points}"/>',
        f'<text x="{margin}" y="20">tokens/s, at most {max(rates):,.0f}</text>',
    ]
    for name, at_s in {"0 s": 0.0, f"{moments[-1][0]:.0f} s": _BIN_S * len(rates), **lines}.items():
        x = margin + at_s * per_s
        top = height - margin if name.endswith(" s") else margin
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - margin}" stroke="#d9480f"/>'
            f'<text x="{x:.1f}" y="{height - 20}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


# -- engines without a process ------------------------------------------------------------------


def simulated(config: ExperimentConfig, sizes: Sequence[int], num_requests: int) -> None:
    """Print what calling engines costs, by their number."""
    print(f"Engines that answer at once; {num_requests:,} requests of one response:\n")
    print("| engines | update of all, ms | µs per engine | requests, s | µs per request |")
    print("|---:|---:|---:|---:|---:|")
    gc.collect()
    gc.freeze()  # else a pass over all objects of the libraries, 0.3 s, falls into some row
    lengths = [1] * num_requests
    answers = Answers()

    def launch(group: GroupPlan, engine: EnginePlan) -> AnsweringEngine:
        return AnsweringEngine(answers)

    for size in sizes:
        with answers, tempfile.TemporaryDirectory(prefix="serving-") as folder:
            server = RolloutServer(plan_of(size), launch, config=config.rollout)
            server.start()
            updates_s = [
                timed(partial(server.update, Path(folder), version=n)) for n in range(_NUM_UPDATES)
            ]
            pool = pool_of(server, config, server.serving_engines())
            requests_s = timed(partial(asyncio.run, ask(pool, lengths, num_keys=1)))
            server.shutdown()
        update_s = statistics.median(updates_s[1:])  # the first one pauses nobody
        print(
            f"| {size} | {1e3 * update_s:.1f} | {1e6 * update_s / size:.0f} | {requests_s:.2f} | "
            f"{1e6 * requests_s / num_requests:.0f} |",
            flush=True,
        )


def plan_of(num_engines: int) -> ModelPlan:
    """Return a plan of equal engines."""
    groups = {"main": ServerGroupConfig(num_devices=num_engines)}
    serving = ServingConfig(
        num_devices_per_node=8,
        colocated=False,
        models={"policy": ServedModelConfig(groups=groups)},
    )
    (plan,) = lay_out(serving.placed_groups, num_devices_per_node=8, num_shared_per_node=0)
    return plan


# -- servers, pools, seconds ----------------------------------------------------------------------


@contextmanager
def served(
    config: ExperimentConfig, model_folder: Path
) -> Iterator[tuple[RolloutServer, list[TimedEngine]]]:
    """Serve the model with the engines of the configuration; yields all that were launched."""
    engines: list[TimedEngine] = []
    resources = RayResourcePool(
        process_on_nodes=[config.serving.num_devices_per_node],
        num_cpus_per_rank=config.cluster.num_cpus_per_rank,
    )
    (plan,) = plan_servers(config)
    start = ActorLaunch(
        config=config,
        plan=plan,
        policy_folder=model_folder,
        placements=resources.lease(),
    )

    def launch(group: GroupPlan, engine: EnginePlan) -> TimedEngine:
        engines.append(TimedEngine(start(group, engine)))
        return engines[-1]

    server = RolloutServer(plan, launch, config=config.rollout)
    try:
        server.start()
        server.update(model_folder, version=0)
        yield server, engines
    finally:
        server.shutdown()
        resources.give_back()


def pool_of(
    server: RolloutServer, config: ExperimentConfig, engines: Mapping[int, EngineHandle]
) -> EnginePool:
    """Return a pool of these engines of the server."""
    starter = config.model.starter
    return EnginePool(
        engines,
        num_slots=config.rollout.num_slots,
        max_context_tokens=config.max_row_tokens,
        vocab_size=starter.vocab_size if starter else 0,
        version=server.version,
    )


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
