"""Memory of a rollout engine on one of the ranks that share it.

Legend: N rows that decode together, V vocabulary. An SGLang server's memory besides weights and
KV cache comes from the sources of SGLang 0.5.21 (paths below ``sglang/srt``), not from measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup
from hybridrl.models.architecture import Architecture, architecture_of, read_architecture
from hybridrl.planning.plan import capacity_bytes
from hybridrl.planning.split import count_adapter, count_parameters

_MIB = 2**20
BYTES = {"float32": 4, "bfloat16": 2}
"""Size of a number of each type that a configuration can name."""

_FLOAT32 = 4
_FLOAT64 = 8
_INT32 = 4
_INT64 = 8

_CONTEXT = 512 * _MIB
"""CUDA context, loaded kernels, cuBLAS. An allowance; SGLang reserves as much for "constant meta
data" (arg_groups/memory_hook.py, handle_gpu_memory_settings)."""

_WORKSPACE = 512 * _MIB
"""FlashInfer's scratch memory for Qwen (layers/attention/flashinfer_backend.py, __init__).
FlashAttention 3, the default on Hopper, has none, and Triton's is small."""

_PEERS = 1024 * _MIB
"""For 8 ranks that share a server: NCCL, and buffers of the custom all-reduce. SGLang reserves
tp / 8 of it (memory_hook.py)."""

_GRAPH = 2 * _MIB
"""Per captured row (memory_hook.py, reserve_for_graph_mb)."""

_PREFILL_TOKENS = 4096
"""Tokens of one prefill pass of the embedded engine, with padding (rollout/embedded/prefill.py)."""

_CHUNK_TOKENS = 8192
"""``chunked_prefill_size`` on a GPU of 60 to 160 GiB (memory_hook.py)."""


class RolloutMemory:
    """Bytes of one engine on one of the ranks that share it."""

    def __init__(self, config: ExperimentConfig, model: Architecture) -> None:
        self.config = config
        self.model = model
        self._rollout = config.rollout
        self._size = BYTES[config.rollout.dtype]
        self._prompt_tokens = config.data.max_prompt_tokens
        # A server has processes of its own, outside a rank's memory meter.
        self._is_server = config.rollout.engine == "sglang"
        self._is_server_on_gpu = self._is_server and config.cluster.device == "cuda"

    @property
    def weights(self) -> int:
        """All weights, divided over the ranks of an engine, and those of adapters beside them."""
        lora, number = self.config.lora, self.config.num_adapters
        adapters = number * count_adapter(self.model, lora) if lora.sends_adapters else 0
        return self.base_weights + self._share(adapters) * self._size

    @property
    def base_weights(self) -> int:
        """The weights without an adapter."""
        return self._share(count_parameters(self.model)) * self._size

    @property
    def kv_cache(self) -> int:
        """Keys and values, allocated once for every slot at full length. On a GPU SGLang takes the
        rest of its share of the device: 0 if the device's size is unknown.
        """
        if self._is_server_on_gpu:
            return max(0, self.share - self.weights)
        num_slots = self._rollout.num_slots
        cache = self._keys_and_values(num_slots * self.config.max_context_tokens)
        return cache + num_slots * self._state

    @property
    def share(self) -> int:
        """The part of the GPU that a server takes for weights and cache; 0 if it is unknown."""
        cluster = self.config.cluster
        device_bytes = capacity_bytes(cluster) if cluster.device == "cuda" else None
        return int(self._rollout.memory_fraction * (device_bytes or 0))

    @property
    def smallest_share(self) -> int:
        """The least with which a server can start: weights, and a cache of one row."""
        return self.weights + self._keys_and_values(self.config.max_context_tokens) + self._state

    @property
    def computing(self) -> int:
        """The most that a call holds besides weights and cache. A server on a CPU holds it in host
        memory of its own.
        """
        if self._is_server:
            return self._is_server_on_gpu * self._computing_of_server()
        num_ranks = self.config.cluster.num_ranks
        num_sampled = max(1, self.config.num_rows_per_step // num_ranks)
        group_size = max(1, self._rollout.num_responses_per_prompt // num_ranks)
        most = -(-num_sampled // group_size) * self._prompt_tokens
        tokens = max(self._prompt_tokens, min(_PREFILL_TOKENS, most))  # of one pass
        num_prompts = max(1, tokens // self._prompt_tokens)
        prefilled = self._keys_and_values(tokens) + num_prompts * self.model.vocab_size * self._size
        # One block's temporary tensors over the prompts of a pass.
        per_token = 3 * self.model.intermediate_size + 3 * self.model.hidden_size
        prefill = tokens * (per_token + 2 * self.model.query_size) * self._size
        num_rows = min(self._rollout.num_slots, num_sampled)
        copied = self._keys_and_values(num_rows * self._prompt_tokens)
        # Logits, probabilities and their float64 sums, for all rows that decode.
        copies = self._size + 2 * _FLOAT32 + 2 * _FLOAT64  # cumsum makes a float64 copy first
        if self._rollout.top_k > 0 or self._rollout.top_p < 1:
            copies += _FLOAT32 + _INT64
        drawing = num_rows * self.model.vocab_size * copies
        return prefilled + max(prefill, copied, drawing, self._tower(tokens))

    # -- a server on a GPU -----------------------------------------------------------------------

    @property
    def server_resident(self) -> int:
        """Memory that a release leaves: torch_memory_saver does not manage it.

        The buffer for N rows of logits that all graphs share (model_executor/
        graph_shared_output.py), and the table of pages that they read
        (layers/attention/flashattention_backend.py, init_cuda_graph_state).
        """
        num_ranks, num_slots = self._rollout.tensor_parallel_size, self._rollout.num_slots
        peers = _PEERS * num_ranks // 8 if num_ranks > 1 else 0
        per_slot = self.model.vocab_size * _FLOAT32 + self.config.max_context_tokens * _INT32
        by_graphs = self._rollout.captures_graphs * num_slots * per_slot
        # Where the model sees, the process that cuts images has a context, too
        # (multimodal/processors/base_processor.py, _fast_image_processor_device).
        contexts = _CONTEXT * (1 if self.model.tower is None else 2)
        return self._is_server_on_gpu * (contexts + _WORKSPACE + peers + by_graphs)

    @property
    def server_graphs(self) -> int:
        """Captured graphs of decode steps, which sleep releases."""
        captures = self._is_server_on_gpu and self._rollout.captures_graphs
        return captures * _GRAPH * self._rollout.num_slots

    @property
    def server_routes(self) -> int:
        """Host memory in which a rank of a server keeps the expert ids of every cached token.

        Pinned int32 [tokens, layers, experts a token] (sglang/srt/state_capturer/base.py).
        """
        experts = self.model.experts
        if not self._is_server or not self.config.returns_experts or experts is None:
            return 0
        num_tokens = self.kv_cache // self._keys_and_values(1)
        return num_tokens * self.model.num_layers * experts.num_per_token * _INT32

    def _computing_of_server(self) -> int:
        given = self._rollout.engine_args.get("chunked_prefill_size")
        chunk_tokens = given if isinstance(given, int) and given > 0 else _CHUNK_TOKENS
        # One block's temporary tensors over a chunk of prompts; heads and MLPs are split.
        experts, inside = self.model.experts, self.model.intermediate_size
        if experts is not None:
            of_experts = experts.num_per_token * experts.intermediate_size
            inside = max(inside, of_experts + experts.shared_size)
        split = 3 * inside + 2 * self.model.query_size + 2 * self.model.key_size
        per_token = 3 * self.model.hidden_size + self._share(split)
        chunk = chunk_tokens * per_token * self._size
        # Logits at the temperature and their probabilities (layers/sampler.py).
        drawing = 2 * self._rollout.num_slots * self.model.vocab_size * _FLOAT32
        # An image whose tokens are in two chunks is computed at once, with the first.
        return max(chunk, drawing, self._tower(chunk_tokens + self._prompt_tokens))

    # -- sizes -----------------------------------------------------------------------------------

    def _tower(self, num_tokens: int) -> int:
        """Patches, and one block's temporary tensors over them, of so many tokens of images."""
        tower = self.model.tower
        if tower is None:
            return 0
        split = 3 * tower.intermediate_size + 4 * tower.hidden_size
        per_patch = tower.patch_size + 3 * tower.hidden_size + self._share(split)
        return num_tokens * tower.num_merged * per_patch * self._size

    def _keys_and_values(self, num_tokens: int) -> int:
        model = self.model
        of_layer = 2 * self._share(model.key_size)
        if self._is_server and model.latent is not None:  # not divided over ranks
            of_layer = model.latent.cached_size
        return num_tokens * model.num_attention_layers * of_layer * self._size

    @property
    def _state(self) -> int:
        """Of the recurrent layers, for one row."""
        net = self.model.delta_net
        return 0 if net is None else len(net.layers) * self._share(net.state_size) * _FLOAT32

    def _share(self, number: int) -> int:
        return -(-number // self._rollout.tensor_parallel_size)


def plan_servers(config: ExperimentConfig) -> Iterator[tuple[PlacedGroup, RolloutMemory]]:
    """Yield each group that has engines, and the memory of a device of one, apart from ranks."""
    if not config.has_servers:
        return
    for group in config.serving.placed_groups:
        path, size = config.serving.models[group.model].path, group.config.devices_per_engine
        is_of_rank = path is None and size == config.rollout.tensor_parallel_size
        if not group.config.num_engines or (is_of_rank and config.is_on_trainer(group)):
            continue
        model = architecture_of(config.model) if path is None else read_architecture(Path(path))
        rollout = replace(config.rollout, tensor_parallel_size=size)
        yield group, RolloutMemory(replace(config, rollout=rollout), model)
