"""What we use of megatron-core (arXiv:1909.08053, 2104.04473). The only module that imports it.

While it is imported it warns that TransformerEngine and Apex are missing, once for each of its
modules. That is a way to run it and no surprise: ``megatron.layers`` says which one is wanted.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    from megatron.core import __version__ as VERSION
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        get_transformer_layer_offset,
    )

# Without TransformerEngine routers ask for a name that the failed import left unbound.
vars(moe_utils).setdefault("te_general_gemm", None)

# What follows is said again in each process, and asks nothing of a user.
for _message in (
    r"The \.grad attribute of a Tensor that is not a leaf",  # a float32 master is a view
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"WARNING: there is no optimizer on RANK",  # where adapters of experts alone learn
    r"When using async grad allreduce it is recommended",  # trainer/workers.py sets the variable
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of an expert
):
    warnings.filterwarnings("ignore", message=_message)

__all__ = [
    "HAVE_TE",
    "VERSION",
    "ChainedOptimizer",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "LanguageModelEmbedding",
    "LanguageModule",
    "MegatronModule",
    "MoEAuxLossAutoScaler",
    "ModelType",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "TENorm",
    "TopKRouter",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
]
