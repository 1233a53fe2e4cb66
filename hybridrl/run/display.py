"""The display of a running run: a live table in a terminal, plain lines elsewhere.

The loop calls ``live.begin_step(3)``, ``live.phase("generate")`` and ``live.step(3, ...)``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import inf, isfinite
from statistics import fmean
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from hybridrl.metrics import format_duration, format_value

_SHOWN = (
    *("reward/mean", "eval/reward/mean", "loss/supervised_nats", "eval/loss_nats"),
    *("loss/preference", "preference/accuracy", "eval/accuracy", "preference/margin/mean"),
    *("length/response_tokens/mean", "rollout/truncated_fraction"),
    *("agent/turns/mean", "agent/tool_calls/mean", "agent/tool_error_fraction"),
    *("policy/entropy_nats/mean", "policy/kl_to_reference_nats/mean", "policy/grad_norm"),
    *("critic/explained_variance", "policy/sampler_mismatch_nats/mean", "policy/skipped_updates"),
    *("time/step_s", "throughput/tokens_per_s"),
)
"""Metrics to display, in this order; ``metrics.jsonl`` has all of them."""

_TREND_WIDTH = 32
_SMOOTHED_STEPS = 10
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Holds a run's state, and shows nothing. The loop writes; a display's thread may read."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_done = 0
        self.has_begun = False
        """Whether this process has begun a step."""
        self.trends: dict[str, list[float]] = {}
        self._running_step: int | None = None
        self._phase = "start"
        self._progress = ""
        self._phase_began = time.monotonic()
        # The pace of 10 steps, from the first end of a step: the time until then is start-up.
        self._ends: deque[float] = deque(maxlen=11)

    def phase(self, name: str) -> None:
        """Begin a phase, for example ``generate``."""
        # The time first: a reader in between then sees an old phase as young, never as old.
        self._phase_began = time.monotonic()
        self._phase = name
        self._progress = ""

    def progress(self, text: str) -> None:
        """Say how far the phase is, for example ``2,048 rows``."""
        self._progress = text

    def begin_step(self, step: int) -> None:
        """Begin step ``step``, counted from 1."""
        self.has_begun = True
        self._running_step = step

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """End step ``step`` with its metrics; 0 is the time before the first step.

        Metrics of an earlier step than the running one are of its evaluation, and end none.
        """
        if self._running_step in (None, step):
            self.num_done = step
            self._running_step = None
            self.phase(f"after step {step}")
            if step:
                self._ends.append(time.monotonic())
        self._remember(values)

    def break_off(self) -> None:
        """Leave the running step: a new start follows, which does not count for the pace."""
        self._running_step = None
        self._ends.clear()

    def rewind(self, step: int, history: Iterable[Mapping[str, float]]) -> None:
        """Go back to the end of ``step``; ``history`` is the metrics of the steps until then."""
        self.break_off()
        self.num_done = step
        self.trends = {}
        for values in history:
            self._remember(values)

    def _remember(self, values: Mapping[str, float]) -> None:
        for name in _SHOWN:
            if name in values:
                self.trends.setdefault(name, []).append(values[name])

    def describe_phase(self) -> str:
        """Name the running step, if any, and the age of its present phase."""
        running = self._running_step
        where = "" if running is None else f"step {running}/{self.num_steps}: "
        phase = f"{self._phase}: {self._progress}" if self._progress else self._phase
        return f"{where}{phase}, {time.monotonic() - self._phase_began:.0f} s"

    def describe_place(self) -> str:
        """Return the position of the run at an error."""
        where = "in" if self.has_begun else "before"
        step = min(self.num_done + 1, self.num_steps)
        age_s = time.monotonic() - self._phase_began
        place = f"{where} step {step} of {self.num_steps}, {self._phase}"
        return f"{place}, {age_s:.1f} s after that began"

    def describe_time_left(self) -> str:
        """Return how long the other steps take at the pace of the last ones; empty if unknown."""
        num_timed = len(self._ends) - 1
        if num_timed < 1:
            return ""
        pace_s = (self._ends[-1] - self._ends[0]) / num_timed
        left_s = (self.num_steps - self.num_done) * pace_s
        return f"{format_duration(left_s)} left" if left_s >= 1.0 else ""

    def smoothed(self, name: str) -> str:
        """Write the mean of a metric's last 10 values; empty if a single value is as good."""
        values = self.trends[name][-_SMOOTHED_STEPS:]
        return "" if len(values) < 2 or name.startswith("eval/") else format_value(fmean(values))


class LiveLines(LiveView):
    """One line a step, and one every 5 s of silence that names the slow phase."""

    def __init__(self, num_steps: int, *, stream: TextIO, heartbeat_s: float = 5.0) -> None:
        super().__init__(num_steps)
        self._stream = stream
        self._heartbeat_s = heartbeat_s
        self._spoke = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._beat, daemon=True, name="live-lines")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the line of a step."""
        super().step(step, values)
        shown = [name for name in _SHOWN if name in values][:4]  # those that fit into a line
        words = [f"{name} {format_value(values[name])}" for name in shown]
        if shown and (smoothed := self.smoothed(shown[0])):
            num_smoothed = min(_SMOOTHED_STEPS, len(self.trends[shown[0]]))
            words[0] += f" (mean of {num_smoothed}: {smoothed})"
        if "time/step_s" in values and "time/step_s" not in shown:
            words.append(f"{values['time/step_s']:.2f} s")
        line = [f"step {step}/{self.num_steps}", *words, self.describe_time_left()]
        self._say("  ".join(line).rstrip())
        self._spoke.set()

    def start(self) -> None:
        """Begin to report slow phases."""
        self._thread.start()

    def stop(self) -> None:
        """End; no line comes afterwards."""
        self._is_over = True
        self._spoke.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._is_over:
            if self._spoke.wait(self._heartbeat_s):
                self._spoke.clear()
            else:
                self._say(self.describe_phase())

    def _say(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except BrokenPipeError:  # nobody reads any more, as after `| head`: the run continues
            self._is_over = True


class LiveTable(LiveView):
    """A table that redraws itself: progress, the present phase, and each metric with its trend."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self._spinner = Spinner("dots")

    def __rich__(self) -> Group:
        self._spinner.update(text=f"{self.describe_phase()}   {self.describe_time_left()}")
        bar = Table.grid()  # a bar outside a grid does not end its line
        bar.add_row(ProgressBar(self.num_steps, self.num_done, width=_TREND_WIDTH))
        table = Table(box=None, pad_edge=False)
        table.add_column("metric")
        for title in ("first", "last", f"mean of {_SMOOTHED_STEPS}"):
            table.add_column(title, justify="right")
        table.add_column("since the start")
        for name in _SHOWN:
            if name in self.trends:
                trend = self.trends[name]
                ends = (format_value(trend[0]), format_value(trend[-1]), self.smoothed(name))
                table.add_row(name, *ends, sparkline(squeeze(trend, width=_TREND_WIDTH)))
        return Group(self._spinner, bar, table)


@contextmanager
def open_live(mode: str, *, num_steps: int, stream: TextIO) -> Iterator[LiveView]:
    """Show a run while the block lasts; ``auto`` is a table if ``stream`` is a terminal."""
    console = Console(file=stream)
    if mode == "off":
        yield LiveView(num_steps)
    elif mode == "table" or (mode == "auto" and console.is_terminal):
        table = LiveTable(num_steps)
        with Live(table, console=console, refresh_per_second=8):
            yield table
    else:
        lines = LiveLines(num_steps, stream=stream)
        lines.start()
        try:
            yield lines
        finally:
            lines.stop()


def squeeze(values: Sequence[float], *, width: int) -> list[float]:
    """Return at most ``width`` values: each the mean of a span, all spans nearly equal."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    return [fmean(values[begin:end]) for begin, end in pairwise(edges)]


def sparkline(values: Sequence[float]) -> str:
    """Draw values as blocks between their minimum and maximum; zeros alone lie on the ground."""
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    height = high - low

    def block(value: float) -> str:
        if not isfinite(value):
            return " "
        fraction = (value - low) / height if 0.0 < height < inf else 0.5 * bool(high)
        return _BLOCKS[min(int(fraction * len(_BLOCKS)), len(_BLOCKS) - 1)]

    return "".join(map(block, values))
