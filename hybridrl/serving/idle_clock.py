"""How long engines sampled nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from hybridrl.metrics import Max, Metrics
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import SamplingEngine
from hybridrl.serving.engine_pool import AskGroup


class IdleClock:
    """Adds the seconds in which no request is open, of any engine. For one event loop."""

    def __init__(self) -> None:
        """Begin with no request. Seconds count from the first use of ``counting``."""
        self._num_open = 0
        self._idle_s = 0.0
        self._since_s: float | None = None

    def counting(self, ask: AskGroup) -> AskGroup:
        """Return a way to ask engines that counts open requests.

        The start of the engines, which comes before, is not idleness.
        """
        if self._since_s is None:
            self._since_s = time.perf_counter()

        async def counted(
            engine: SamplingEngine,
            token_ids: Sequence[int] | Tensor,
            params: RequestParams,
            keys: Sequence[int],
        ) -> list[Sample]:
            self._change(1)
            try:
                return await ask(engine, token_ids, params, keys)
            finally:
                self._change(-1)

        return counted

    def take_metrics(self) -> Metrics:
        """Return the seconds since the last call, and begin again."""
        self._change(0)
        idle_s, self._idle_s = self._idle_s, 0.0
        return {"time/engines_idle_s": Max(idle_s)}

    def _change(self, number: int) -> None:
        if self._since_s is None:
            return
        now_s = time.perf_counter()
        if not self._num_open:
            self._idle_s += now_s - self._since_s
        self._since_s = now_s
        self._num_open += number
