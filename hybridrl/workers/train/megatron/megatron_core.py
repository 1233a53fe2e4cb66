"""Our imports of megatron-core (arXiv:1909.08053, 2104.04473). No other module imports it.

``IMPORT_WARNINGS`` keeps its warnings of the import, once for each of its modules: engines log them
on one rank.
"""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings(record=True) as _caught:
    warnings.simplefilter("always")
    from megatron.core import __version__ as VERSION
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.extensions.transformer_engine import (
        HAVE_TE,
        TEColumnParallelLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        checkpoint,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        get_transformer_layer_offset,
    )

IMPORT_WARNINGS = tuple(
    dict.fromkeys(
        " ".join(str(warning.message).split())
        for warning in _caught
        # A user can change nothing about its use of deprecated names of torch.
        if not issubclass(warning.category, DeprecationWarning | FutureWarning)
    )
)

HAVE_FUSED_ROPE = rope_utils.fused_apply_rotary_pos_emb is not None
HAVE_FUSED_PERMUTE = vars(moe_utils).get("fused_permute") is not None

COLUMN_PARALLEL: tuple[type, ...] = (ColumnParallelLinear,)
ROW_PARALLEL: tuple[type, ...] = (RowParallelLinear,)
WITH_NORM: tuple[type, ...] = ()
"""The column-parallel layers that normalise their inputs first."""
if HAVE_TE:  # else its names are not classes
    COLUMN_PARALLEL += (TEColumnParallelLinear, TELayerNormColumnParallelLinear)
    ROW_PARALLEL += (TERowParallelLinear,)
    WITH_NORM = (TELayerNormColumnParallelLinear,)

# Without TransformerEngine routers ask for a name that the failed import left unbound.
vars(moe_utils).setdefault("te_general_gemm", None)

# These warnings come in each process, and a user need not act on them.
_HARMLESS = [
    r"The \.grad attribute of a Tensor that is not a leaf",  # a float32 master is a view
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"WARNING: there is no optimizer on RANK",  # where only adapters of experts learn
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of an expert
]
if not torch.cuda.is_available():  # of CUDA's queues; run/workers.py sets their number
    _HARMLESS.append(r"When using async grad allreduce it is recommended")
for _message in _HARMLESS:
    warnings.filterwarnings("ignore", message=_message)
