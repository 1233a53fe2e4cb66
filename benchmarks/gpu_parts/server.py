"""What is known of the rollout server behind an engine, from its log."""

from __future__ import annotations

from benchmarks.gpu_parts.rank import Rank


def count_graph_captures(rank: Rank) -> int | None:
    """Return how often the server captured CUDA graphs so far; None where it has none."""
    return None
