"""Memory of a rollout engine on one rank; see ``workers/rollout``.

Legend: N rows that decode together, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.rollout import RolloutConfig
from hybridrl.planning.roles import BYTES, AdapterShape
from hybridrl.planning.server import ServerMemory
from hybridrl.planning.shapes import ModelShape
from hybridrl.planning.workload import Workload

_FLOAT32 = 4
_FLOAT64 = 8
_INT32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Bytes of one engine on one of the ranks that share it."""

    shape: ModelShape
    config: RolloutConfig
    workload: Workload

    max_context_tokens: int
    """Length of a row of the cache; the longest that the configuration allows."""

    adapter: AdapterShape | None = None
    """Of ``lora.sync=adapter``: the engine applies it beside its weights."""

    device_bytes: int | None = None
    """Of the GPU on which a server sizes its own cache; None on a CPU, or where nobody said."""

    on_gpu: bool = False

    @property
    def is_server(self) -> bool:
        """Whether the engine has processes of its own, which the meter of a rank does not see."""
        return self.config.engine == "sglang"

    @property
    def weights(self) -> int:
        """All weights, divided over the ranks of an engine; and the adapter's."""
        return self.base_weights + self._share(self._num_adapter_parameters) * self._size

    @property
    def base_weights(self) -> int:
        """The weights without an adapter."""
        return self._share(self.shape.num_parameters) * self._size

    @property
    def kv_cache(self) -> int:
        """Keys and values, allocated once: of every slot at full length; SGLang takes a share."""
        if self.is_server and self.device_bytes is not None:
            return max(0, int(self.config.memory_fraction * self.device_bytes) - self.weights)
        return self._keys_and_values(self.config.num_slots * self.max_context_tokens)

    @property
    def sampling(self) -> int:
        """The most that a call holds besides weights and cache; on a CPU a server's is host memory
        of its own.
        """
        if self.is_server:
            return self._server.computing if self.on_gpu else 0
        prefilled = self._keys_and_values(self.workload.prefill_tokens) + self._prefill_logits
        return prefilled + max(self._prefill, self._seating, self._drawing)

    @property
    def server_resident(self) -> int:
        """What a server on a GPU holds from start to end."""
        return self._server.resident if self.is_server and self.on_gpu else 0

    @property
    def server_graphs(self) -> int:
        """The graphs of a server on a GPU while it is awake."""
        return self._server.graphs if self.is_server and self.on_gpu else 0

    @property
    def server_routes(self) -> int:
        """Host memory in which a rank of a server keeps the experts of every cached token.

        Pinned int32 [tokens, layers, experts a token] (sglang/srt/state_capturer/base.py).
        """
        experts = self.shape.experts
        if not self.is_server or not self.config.routed_experts or experts is None:
            return 0
        num_tokens = self.kv_cache // self._keys_and_values(1)
        return num_tokens * self.shape.num_layers * experts.num_per_token * _INT32

    @property
    def _server(self) -> ServerMemory:
        return ServerMemory(self.shape, self.config, self.max_context_tokens)

    @property
    def _prefill(self) -> int:
        """One block's passing tensors over the prompts of a pass."""
        per_token = 3 * self.shape.intermediate_size + 3 * self.shape.hidden_size
        per_token += 2 * self.shape.query_size
        return self.workload.prefill_tokens * per_token * self._size

    @property
    def _prefill_logits(self) -> int:
        num_prompts = max(1, self.workload.prefill_tokens // self.workload.num_prompt_tokens)
        return num_prompts * self.shape.vocab_size * self._size

    @property
    def _seating(self) -> int:
        """The copy of prompts' keys and values on their way to the slots."""
        return self._keys_and_values(self._num_rows * self.workload.num_prompt_tokens)

    @property
    def _drawing(self) -> int:
        """Logits, probabilities and their float64 sums, for all rows that decode."""
        is_cut = self.config.top_k > 0 or self.config.top_p < 1
        copies = self._size + 2 * _FLOAT32 + 2 * _FLOAT64  # cumsum makes a float64 copy first
        copies += (_FLOAT32 + _INT64) if is_cut else 0
        return self._num_rows * self.shape.vocab_size * copies

    @property
    def _num_rows(self) -> int:
        return min(self.config.num_slots, self.workload.num_rows)

    @property
    def _num_adapter_parameters(self) -> int:
        return self.adapter.num_parameters if self.adapter else 0

    @property
    def _size(self) -> int:
        return BYTES[self.config.dtype]

    def _keys_and_values(self, num_tokens: int) -> int:
        return (
            2 * self.shape.num_layers * num_tokens * self._share(self.shape.key_size) * self._size
        )

    def _share(self, number: int) -> int:
        return -(-number // self.config.tensor_parallel_size)
