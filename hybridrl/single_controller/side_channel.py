"""Messages from ranks to the driver while a call runs: they may be lost, which costs time alone."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class ChannelLost(Exception):
    """The process that holds the messages is gone."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The end of a rank; travels there as an argument of a call."""

    queue: Any
    """Handle of the queue's actor."""

    def send(self, message: object) -> None:
        """Send and do not wait. The queue never opens the pickle, so it needs no torch."""
        self.queue.put_nowait.remote(pickle.dumps(message))


class SideChannel:
    """The end of the driver; close it at the end."""

    def __init__(self) -> None:
        """Start the process that holds the messages, on the machine of the driver."""
        node_id = ray.get_runtime_context().get_node_id()
        placed = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": placed})
        self.sender = Sender(self._queue.actor)

    def receive(self) -> Any:  # noqa: ANN401 - the sender's object
        """Wait for the next message; ``ChannelLost`` if there will be none."""
        try:
            return pickle.loads(ray.get(self.sender.queue.get.remote()))
        except (RayError, RuntimeError) as error:
            raise ChannelLost(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """End the process. Twice is a no-op."""
        with suppress(RayError, RuntimeError):  # Ray is gone, and the process with it
            ray.kill(self.sender.queue)
