"""Engines over several nodes: the first node's process answers, the others follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.serving.engine_process import RayEngine, answer_of, first_ended
from hybridrl.serving.reserved_nodes import ReservedNode
from hybridrl.workers.rollout.sglang.arguments import ServerPlace, server_spec, show_devices
from hybridrl.workers.rollout.sglang.follower import follow


class FollowerProcess:
    """The actor on a further node of an engine: a parent for SGLang's processes there."""

    def __init__(self, config: ExperimentConfig, model_folder: Path, place: ServerPlace) -> None:
        """Start nothing yet.

        Args:
            config: of the run, as ``engine_config`` returns it for this node.
            model_folder: whose configuration the engine reads.
        """
        self._spec = server_spec(config, model_folder)
        self._variables = show_devices(place.gpus)

    async def live(self) -> None:
        """Start SGLang, and never return: the call ends with SGLang, or with the process."""
        await asyncio.to_thread(follow, self._spec, variables=self._variables)


class FollowedEngine(RayEngine):
    """An engine over several nodes. It is lost as soon as one of them is."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 - Ray's
        *followers: Any,  # noqa: ANN401 - Ray's
        nodes: Sequence[ReservedNode] = (),
    ) -> None:
        super().__init__(actor, nodes=nodes)
        self._followers = followers
        self._lives = [answer_of(follower.live.remote()) for follower in followers]

    def build(self) -> Future[None]:
        """Build the engine. A follower that ends meanwhile ends the wait."""
        return first_ended(super().build(), *self._lives)

    def is_alive(self) -> bool:
        """Whether the processes on all nodes are there."""
        return super().is_alive() and not any(life.done() for life in self._lives)

    def end(self) -> None:
        """Kill all processes. Idempotent."""
        super().end()
        for follower in self._followers:
            ray.kill(follower)
