"""What an SGLang server holds on each of its GPUs besides weights and KV cache.

Read in the sources of SGLang 0.5.21 (paths below ``sglang/srt``); none of it was measured. Legend:
N rows that decode together, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.rollout import RolloutConfig
from hybridrl.planning.roles import BYTES
from hybridrl.planning.shapes import ModelShape

_MIB = 2**20
_FLOAT32 = 4
_INT32 = 4

_CONTEXT = 512 * _MIB
"""CUDA context, loaded kernels, cuBLAS. An allowance; SGLang reserves as much for "constant meta
data" (arg_groups/memory_hook.py, handle_gpu_memory_settings)."""

_WORKSPACE = 512 * _MIB
"""FlashInfer's scratch memory for Qwen (layers/attention/flashinfer_backend.py, __init__).
FlashAttention 3, the default on Hopper, has none, and Triton's is small."""

_PEERS = 1024 * _MIB
"""Of 8 ranks that share a server: NCCL, and buffers of the custom all-reduce. SGLang reserves
tp / 8 of it (memory_hook.py)."""

_GRAPH = 2 * _MIB
"""Of a captured row (memory_hook.py, reserve_for_graph_mb)."""

_CHUNK_TOKENS = 8192
"""``chunked_prefill_size`` on a GPU of 60 to 160 GiB (memory_hook.py)."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes of one rank of a server on its GPU."""

    shape: ModelShape
    config: RolloutConfig

    max_context_tokens: int
    """Longest prompt plus response."""

    @property
    def resident(self) -> int:
        """What stays while everything that can be released is: torch_memory_saver has none of it.

        The buffer for N rows of logits that all graphs share (model_executor/
        graph_shared_output.py), and the table of pages that they read
        (layers/attention/flashattention_backend.py, init_cuda_graph_state).
        """
        num_ranks = self.config.tensor_parallel_size
        peers = _PEERS * num_ranks // 8 if num_ranks > 1 else 0
        logits = self.config.num_slots * self.shape.vocab_size * _FLOAT32
        pages = self.config.num_slots * self.max_context_tokens * _INT32
        by_graphs = logits + pages if self.config.cuda_graphs else 0
        return _CONTEXT + _WORKSPACE + peers + by_graphs

    @property
    def graphs(self) -> int:
        """Captured graphs of decode steps, which sleep releases."""
        return _GRAPH * self.config.num_slots if self.config.cuda_graphs else 0

    @property
    def computing(self) -> int:
        """The most that one pass holds: a block over a chunk of prompts, or N rows being drawn.

        Drawing: logits at the temperature and their probabilities (layers/sampler.py).
        """
        return max(self._chunk, 2 * self.config.num_slots * self.shape.vocab_size * _FLOAT32)

    @property
    def _chunk(self) -> int:
        """One block's passing tensors; heads and the inside of MLPs are cut over the ranks."""
        experts, num_ranks = self.shape.experts, self.config.tensor_parallel_size
        inside = self.shape.intermediate_size
        if experts is not None:
            inside = max(inside, experts.num_per_token * experts.intermediate_size)
        cut = 3 * inside + 2 * self.shape.query_size + 2 * self.shape.key_size
        per_token = 3 * self.shape.hidden_size + -(-cut // num_ranks)
        return self._chunk_tokens * per_token * BYTES[self.config.dtype]

    @property
    def _chunk_tokens(self) -> int:
        given = self.config.engine_args.get("chunked_prefill_size")
        return given if isinstance(given, int) and given > 0 else _CHUNK_TOKENS
