"""Fetches what the ranks of a group recorded, beside their work and never instead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from hybridrl.diagnostics.trace import SpanBatch
from hybridrl.errors import WorkerGroupError
from hybridrl.single_controller.actors import RankActors


@dataclass(slots=True)
class SpanCollector:
    """Asks ranks for their spans and picks the answers up later. A failure costs the spans alone.

    A rank answers between two calls, in less than a millisecond. One that is dead or stuck does
    not, and nobody waits for it: telling is the business of the calls that do the work.
    """

    actors: RankActors
    role: str
    """What the ranks are, for their names."""
    _asked: dict[int, Any] = field(default_factory=dict)

    def ask(self) -> None:
        """Send the question to every rank that owes no answer."""
        try:
            self.actors.raise_if_unusable()
        except WorkerGroupError:
            return
        for rank, actor in enumerate(self.actors.actors):
            if rank not in self._asked:
                self._asked[rank] = actor.host_take_spans.remote()

    def collect(self, *, wait_s: float = 0.0) -> list[tuple[str, SpanBatch]]:
        """Return the answers that are there, each with the name of its rank.

        Args:
            wait_s: seconds to wait for those that are not; 0 takes what has come.
        """
        if not self._asked:
            return []
        refs = list(self._asked.values())
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=wait_s, fetch_local=True)
        came = [rank for rank, ref in self._asked.items() if ref in set(done)]
        answers = _answers([self._asked.pop(rank) for rank in came])
        return [
            (f"rank {rank} {self.role} on {self.actors.hosts[rank]}", answer)
            for rank, answer in zip(came, answers, strict=True)
            if answer is not None
        ]


def _answers(refs: Sequence[Any]) -> list[SpanBatch | None]:
    answers: list[SpanBatch | None] = []
    for ref in refs:
        try:
            answers.append(ray.get(ref))
        except RayError:  # the rank is gone; whoever calls it next will say so
            answers.append(None)
    return answers
