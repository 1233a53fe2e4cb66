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
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.sides.drawing import BLUE, ORANGE, Frame, picture, words
from benchmarks.sides.measure import in_turns, print_head, print_row, seconds_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.serving import ServedModelConfig, ServerGroupConfig, ServingConfig
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.starter import write_random_model
from hybridrl.sampler import RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.launching import ActorLaunch
from hybridrl.serving.plan import ModelPlan, PlannedDevices, engines_of, plan_own_engines
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.server import RolloutServer
from hybridrl.single_controller import RayResourcePool
from hybridrl.workers.sharding.lifecycle import Action

_PROMPT = torch.arange(1, 9)
_TOKENS, _LOGPROBS = torch.tensor([1]), torch.zeros(1)
_GROUP_SIZE = 8
_NUM_PROMPTS, _NUM_LONG = 16, 2
_SHORT, _LONG = 12, 240
_BIN_S, _CURVE_S = 0.5, 4.0
_NUM_UPDATES = 6
_LIMIT_S, _RATIO = 3.0, 1.3


def main() -> None:
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
        with ray_cluster(config.cluster, num_more_ranks=config.num_own_server_devices):
            skewed(config, model_folder, num_rounds=options.rounds, num_draws=options.draws)
            killed(config, model_folder, picture_path=options.picture)


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
    print_head("the long ones", "halves, tokens/s", "as engines become free, tokens/s", "ratio")
    with served(config, model_folder) as (server, _):
        drawn = []
        for name, lengths in orders.items():
            ways = {way: partial(way, server, config, lengths) for way in (in_halves, in_any)}
            named = {way.__name__: work for way, work in ways.items()}
            taken = in_turns(named, num_rounds, num_warmup=0)
            tokens = _GROUP_SIZE * sum(lengths)
            halves, free = (tokens / statistics.median(seconds) for seconds in taken.values())
            print_row(name, f"{halves:,.0f}", f"{free:,.0f}", f"{free / halves:.2f}")
            drawn.append(free / halves)
    if num_draws:
        print(f"\nmean ratio of the drawn orders: {statistics.fmean(drawn[1:]):.2f}")


def in_halves(server: RolloutServer, config: ExperimentConfig, lengths: Sequence[int]) -> None:
    """Sample the first half of the prompts with one engine, and the second one with the other."""
    half = len(lengths) // 2
    pools = [pool_of(server, config, {0: one}) for one in server.serving_engines().values()]
    asyncio.run(together(ask(pools[0], lengths[:half]), ask(pools[1], lengths[half:])))


def in_any(server: RolloutServer, config: ExperimentConfig, lengths: Sequence[int]) -> None:
    """Sample all prompts with both engines, as they become free."""
    asyncio.run(ask(pool_of(server, config, server.serving_engines()), lengths))


async def together(*work: Coroutine[Any, Any, object]) -> None:
    await asyncio.gather(*work)


async def ask(
    pool: EnginePool, lengths: Sequence[int], *, num_keys: int = _GROUP_SIZE
) -> list[list[Sample]]:
    requests = [RequestParams(max_new_tokens=length, temperature=1.0) for length in lengths]
    keys = range(num_keys)
    return await asyncio.gather(*(pool.sample_group(_PROMPT, one, keys=keys) for one in requests))


# -- a killed engine ----------------------------------------------------------------------------


def killed(config: ExperimentConfig, model_folder: Path, *, picture_path: Path | None) -> None:
    """Kill an engine while both sample, and print how long its replacement took."""
    with served(config, model_folder) as (server, engines):
        recovery = Recovery(server, health_timeout_s=config.serving.health_timeout_s)
        pool = pool_of(server, config, server.serving_engines())
        with recovery.filling(pool):
            died_s = asyncio.run(kill_one(pool, engines))
    new = engines[-1]
    noticed_s, start_s = new.launched_s - died_s, new.built_s - new.launched_s
    answer_s = new.answers[0][0] - new.built_s
    print("\nAn engine is killed; both sample without a break:\n")
    print_head("what", "s")
    print_row("from its death to the start of its replacement", f"{noticed_s:.2f}")
    print_row("the engine's own start", f"{start_s:.2f}")
    print_row("from there to its first answer, with weights", f"{answer_s:.2f}")
    print_row(f"all but its own start (limit {_LIMIT_S:.0f})", f"{noticed_s + answer_s:.2f}")
    answers = sorted(answer for engine in engines for answer in engine.answers)
    began_s, ended_s, replaced_s = answers[0][0], answers[-1][0], new.answers[0][0]
    print()
    print_head("tokens/s", "both", "of one alone", "with the replacement")
    phases = ((began_s, died_s), (died_s, replaced_s), (replaced_s, ended_s))
    rates = [
        sum(tokens for at_s, tokens in answers if begin < at_s <= end) / (end - begin)
        for begin, end in phases
    ]
    print_row("all engines", *(f"{rate:,.0f}" for rate in rates))
    if picture_path is not None:
        lines = {"killed": died_s - began_s, "replaced": replaced_s - began_s}
        moments = [(at_s - began_s, tokens) for at_s, tokens in answers]
        picture_path.write_text(draw(moments, lines), encoding="utf-8")


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
    engines[0].handle.end()
    while len(engines) == num_engines or not engines[-1].answers:
        await asyncio.sleep(0.05)
    await asyncio.sleep(_CURVE_S)
    is_over.set()
    await asyncio.gather(*clients)
    return died_s


def draw(moments: Sequence[tuple[float, int]], lines: dict[str, float]) -> str:
    """Return an SVG of tokens per second over time, with named moments."""
    rates = [0.0] * (int(moments[-1][0] / _BIN_S) + 1)
    for at_s, tokens in moments:
        rates[int(at_s / _BIN_S)] += tokens / _BIN_S
    rates = rates[:-1] or rates  # the last one is not full
    frame = Frame(last_x=_BIN_S * len(rates), high=max(rates), height=260)
    curve = [((n + 0.5) * _BIN_S, rate) for n, rate in enumerate(rates)]
    parts = [
        *frame.axes((), [(0, "0 s"), (frame.last_x, f"{frame.last_x:.0f} s")]),
        frame.curve(curve, BLUE),
        words(frame.left, 20, f"tokens/s, at most {max(rates):,.0f}"),
    ]
    for name, at_s in lines.items():
        parts.append(frame.curve([(at_s, 0), (at_s, frame.high)], ORANGE, width=1))
        x, bottom = frame.pixel((at_s, 0))
        parts.append(words(x, bottom + 18, name, anchor="middle"))
    return picture(frame.width, frame.height, parts)


# -- engines without a process ------------------------------------------------------------------


def simulated(config: ExperimentConfig, sizes: Sequence[int], num_requests: int) -> None:
    """Print what calling engines costs, by their number."""
    print(f"Engines that answer at once; {num_requests:,} requests of one response:\n")
    print_head(
        *("engines", "update of all, ms", "µs per engine", "requests, s", "µs per request"),
        num_texts=0,
    )
    gc.collect()
    gc.freeze()  # else a pass over all objects of the libraries, 0.3 s, falls into some row
    lengths = [1] * num_requests
    answers = Answers()

    def launch(engine: PlannedDevices) -> AnsweringEngine:
        return AnsweringEngine(answers)

    for size in sizes:
        with answers, tempfile.TemporaryDirectory(prefix="serving-") as folder:
            server = RolloutServer(plan_of(size), launch, config=config.rollout)
            server.start()
            updates_s = [
                seconds_of(partial(server.update, Path(folder), version=n))
                for n in range(_NUM_UPDATES)
            ]
            pool = pool_of(server, config, server.serving_engines())
            requests_s = seconds_of(partial(asyncio.run, ask(pool, lengths, num_keys=1)))
            server.shutdown()
        update_s = statistics.median(updates_s[1:])  # the first one pauses nobody
        print_row(
            *(size, f"{1e3 * update_s:.1f}", f"{1e6 * update_s / size:.0f}"),
            *(f"{requests_s:.2f}", f"{1e6 * requests_s / num_requests:.0f}"),
        )


def plan_of(num_engines: int) -> ModelPlan:
    groups = {"main": ServerGroupConfig(num_devices=num_engines)}
    serving = ServingConfig(
        num_devices_per_node=8, colocated=False, models={"policy": ServedModelConfig(groups=groups)}
    )
    (group,) = serving.placed_groups
    return ModelPlan("policy", engines_of(group, per_node=8))


# -- servers, pools, seconds ----------------------------------------------------------------------


@contextmanager
def served(
    config: ExperimentConfig, model_folder: Path
) -> Iterator[tuple[RolloutServer, list[TimedEngine]]]:
    """Serve the model with the engines of the configuration; yields all that were launched."""
    engines: list[TimedEngine] = []
    resources = RayResourcePool(process_on_nodes=[config.serving.num_devices_per_node])
    (plan,) = plan_own_engines(config)
    start = ActorLaunch(
        config=config, plan=plan, policy_folder=model_folder, placements=resources.lease()
    )

    def launch(engine: PlannedDevices) -> EngineHandle:
        engines.append(TimedEngine(start(engine)))
        return engines[-1].handle

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
    starter = config.model.starter
    return EnginePool(
        engines,
        num_slots=config.rollout.num_slots,
        max_context_tokens=config.max_row_tokens,
        vocab_size=starter.vocab_size if starter else 0,
        version=server.version,
    )


class TimedEngine:
    """What a handle did from here on. Times are of ``time.perf_counter``."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.launched_s = time.perf_counter()
        self.built_s = 0.0
        self.answers: list[tuple[float, int]] = []
        """Time and tokens of each request that was answered."""
        self._build, self._answer = handle.build, handle.answer
        handle.build = self._build_timed  # type: ignore[method-assign]
        handle.answer = self._answer_timed  # type: ignore[method-assign]

    def _build_timed(self) -> Future[None]:
        future = self._build()
        future.add_done_callback(lambda _: setattr(self, "built_s", time.perf_counter()))
        return future

    def _answer_timed(self, request: SampleRequest) -> Future[list[Sample]]:
        future = self._answer(request)
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[list[Sample]]) -> None:
        if not future.cancelled() and future.exception() is None:
            num_tokens = sum(len(sample.token_ids) for sample in future.result())
            self.answers.append((time.perf_counter(), num_tokens))


class Answers:
    """Gives answers in a thread of its own, as Ray does; within a ``with`` block."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], object] | None] = SimpleQueue()

    def give(self, answer: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.put((future, answer))
        return future

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="answers")
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            future, answer = waiting
            future.set_result(answer)


class AnsweringEngine(EngineHandle):
    """Answers at once: what remains is the cost of who calls it."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._version = -1

    def act(self, action: Action) -> Future[Any]:
        if isinstance(action, partial):
            self._version = action.keywords["version"]
        return self._answers.give(None)

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        one = Sample(_TOKENS, _LOGPROBS, "stop", self._version)
        return self._answers.give([one] * len(request.keys))

    def probe(self) -> Future[object]:
        return self._answers.give(None)

    def end(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    main()
