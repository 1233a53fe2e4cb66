"""Starts the rollout engines of a worker group: some ranks are minutes late, all wait for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.sharding.control import ControlGroup, Limit, Neighbours, attempt

_STAGE = "start of the rollout engines"


def start_limit(config: RolloutConfig) -> Limit:
    """Return how long ranks wait for one that starts or restarts its engine.

    An engine has ended its start, well or not, within ``start_timeout_s``; what comes before and
    after it are control calls of one stage.
    """
    return Limit(config.start_timeout_s + config.stage_timeout_s, "rollout.start_timeout_s")


def start_engine(
    build: Callable[[], RolloutEngine] | None, *, config: RolloutConfig, control: ControlGroup
) -> RolloutEngine | None:
    """Start the engine that this rank leads, and wait until all have started. A collective call.

    Args:
        build: starts it; None on a rank that leads no engine.
        config: the rollout section.
        control: the control group of all ranks.

    Raises:
        Exception: on all ranks, what ``build`` raised on the first that could not start its engine:
            whoever hears of it first knows whether to try again. Engines that did start are ended.
        DeadlineError: a rank was not there ``rollout.start_timeout_s`` after the first.
    """
    # Now, while all ranks are here: to make a group, ranks wait for each other no longer than a
    # stage, and to start a server takes longer.
    Neighbours(control, size=config.tensor_parallel_size)
    engine, error = (None, None) if build is None else attempt(build)
    limit = start_limit(config)
    control.meet(_STAGE, timeout_s=limit.timeout_s, key=limit.key)
    errors = control.gather(_STAGE, _fit_to_travel(error))
    failed = [(rank, known) for rank, known in enumerate(errors) if known is not None]
    if not failed:
        return engine
    if engine is not None:
        engine.shutdown()
    rank, known = failed[0]
    known.add_note(f"the rollout engine of rank {rank} did not start")
    raise known from error


def _fit_to_travel(error: Exception | None) -> Exception | None:
    """Return the error, or its words in one of ours where it cannot be pickled and read again."""
    _, unfit = attempt(lambda: pickle.loads(pickle.dumps(error)))
    return error if unfit is None else EngineError(f"{type(error).__name__}: {error}")
