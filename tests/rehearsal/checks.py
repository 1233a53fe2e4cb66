"""What each rehearsal must show, besides that it ends."""

from __future__ import annotations

from tests.rehearsal.cases import Shown

TABLES = 48 * 3 * 2**10 + 2**13
"""Bytes that stay with the engine: counts of experts, 3 KiB in each of 48 layers at most, as much
after four updates as after one; and rotary frequencies."""

_OVERLAP = ("workers/train/offload.py", "workers/train/shards.py", "workers/rollout/")
"""Where nothing may wait for the device besides the synchronisations that say so."""

_RESUME, _RELEASE = "/resume_memory_occupation", "/release_memory_occupation"
_WAKE = (
    f"{_RESUME} weights",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    f"{_RESUME} kv_cache",
    "/continue_generation",
    "/generate",
    "/pause_generation",
    f"{_RELEASE} kv_cache",
    f"{_RELEASE} weights",
)
"""What a server that sleeps is asked in a phase, in this order, among others."""


_FILES = "workers/rollout/weight_folder.py"
"""Writes a file of weights, so it waits for the copy to the host."""


def assert_sound(shown: Shown, *, waits_in: tuple[str, ...] = ()) -> None:
    """It ended, opened all handles, kept state off the device that the KV cache had.

    Args:
        shown: by a rehearsal.
        waits_in: files that wait for a copy to the host by intent.
    """
    assert not shown.error, shown.error
    assert not shown.unopened
    for call in shown.asked:
        if call.path == _RESUME and "kv_cache" in call.tags:
            assert call.allocated < TABLES, f"{call.allocated} bytes stay while the KV cache wakes"
    for event in shown.executed.events:
        overlaps = any(f" at {place}" in event for place in _OVERLAP)
        if overlaps and not any(f" at {place}:" in event for place in (*waits_in, _FILES)):
            assert event.startswith(("copy cuda", "copy cpu", "synchronize")), event
            assert "blocking" not in event, event


def assert_woken_in_order(shown: Shown, *, num_steps: int) -> None:
    """A server that sleeps was woken and put to sleep in each step, one stage after another."""
    asked = [" ".join((call.path, *call.tags)) for call in shown.asked]
    expected = [path for path in _WAKE if path != "/update_weights_from_tensor"]
    phases = [path for path in asked if path in expected and path != "/generate"]
    once = [path for path in expected if path != "/generate"]
    begin = 2  # the release after its start
    assert phases[begin:] == once * num_steps
    for place, path in enumerate(asked):
        if path == "/update_weights_from_tensor":
            before = [each for each in asked[:place] if each in _WAKE and each != path]
            assert before[-1] == "/begin_weight_update"
    served = [asked[place - 1] for place, path in enumerate(asked) if path == "/generate"]
    assert set(served) <= {"/continue_generation", "/generate", "/v1/loads"}


def largest(shown: Shown, phase: str, use: str) -> int:
    """Return the most bytes that somebody had on the device at a fullest moment of a phase."""
    return max(moment.get(use, 0) for moment in shown.executed.device[phase].values())
