"""Build a model in shards, and access this rank's shard of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from hybridrl.config.actor import ActorConfig, ModelKind
from hybridrl.config.model import ModelConfig
from hybridrl.models.experts import ExpertMatrix, StoredNames
from hybridrl.models.load import (
    DTYPES,
    ModelFiles,
    WeightFiles,
    WeightSource,
    build_empty_critic,
    build_empty_model,
    build_empty_reward_model,
    check_weights,
    fill_weights,
    finish_model,
)
from hybridrl.models.packed_model import (
    PackedModel,
    PolicyModel,
    ValueModel,
    keep_attention_eager,
    use_liger_kernels,
)
from hybridrl.models.recurrent import is_recurrent
from hybridrl.models.seeing import sees
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.shard_spec import (
    RankShards,
    ShardSpec,
    TensorShard,
    intersect,
    relative_slices,
)

Adapt = Callable[[PreTrainedModel, WeightSource], WeightSource]
"""Changes a model without memory; returns the weights of the changed model."""


def build_model(
    folder: Path,
    *,
    config: ActorConfig,
    model_config: ModelConfig,
    ranks: Ranks,
    is_trainable: bool = True,
    adapt: Adapt | None = None,
    kind: ModelKind = "policy",
) -> PackedModel:
    """Load a folder, block by block, sharded with FSDP2; ``adapt`` changes it before that."""
    device, files, dtype = ranks.device, WeightFiles(folder), DTYPES[model_config.dtype]
    if kind == "reward_model":
        hf = build_empty_reward_model(folder, files=files, dtype=dtype, device=device)
    else:
        hf = build_empty_model(folder, dtype=dtype)
        check_weights(hf, files)
    if kind == "critic":
        hf = build_empty_critic(folder, dtype=dtype, device=device)
    hf.requires_grad_(is_trainable)
    if sees(hf):
        hf.visual.requires_grad_(is_trainable and not model_config.freeze_vision)
    weights: WeightSource = ModelFiles(files, hf.config.model_type)
    if adapt is not None:
        weights = adapt(hf, weights)
    model = (
        PolicyModel(hf, chunk_tokens=config.logprob_chunk_tokens)
        if kind == "policy"
        else ValueModel(hf)
    )
    _fill_and_shard(model, weights, config=config, ranks=ranks)
    return model


def _fill_and_shard(
    model: PackedModel,
    weights: WeightSource,
    *,
    config: ActorConfig,
    ranks: Ranks,
) -> None:
    """Fill a model without memory, and shard each block as soon as it is filled.

    One rank whose storage and compute types are equal keeps a plain module, if it does not offload.
    FSDP2 would cost a small model 4 % of its update (1.7 M parameters, 2 threads).
    """
    hf, options, device = model.hf, config.fsdp2, ranks.device
    if options.kernels == "liger":
        use_liger_kernels(hf)
    if options.kernels == "compiled":
        compile_blocks(hf)
    needs_cast = {p.dtype for p in hf.parameters()} != {DTYPES[config.compute_dtype]}
    if ranks.size == 1 and not needs_cast and not options.cpu_offload:
        fill_weights(hf, "", weights, device)
        finish_model(hf, device)
        return
    shard = _sharding(config, device, ranks.size)
    parts = {"visual.blocks.": hf.visual.blocks} if sees(hf) else {}
    for prefix, blocks in (*parts.items(), ("model.layers.", hf.model.layers)):
        for number, block in enumerate(blocks):
            fill_weights(block, f"{prefix}{number}.", weights, device)
            shard(block)
    fill_weights(hf, "", weights, device)
    finish_model(hf, device)
    # FSDP2 averages gradients by default. Token weights are shares of the global loss already.
    for module in shard(model).modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum


def _sharding(
    config: ActorConfig, device: torch.device, num_ranks: int
) -> Callable[[nn.Module], FSDPModule]:
    options = config.fsdp2
    num_shards = num_ranks // options.num_replicas
    if options.num_replicas == 1:
        mesh = init_device_mesh(device.type, (num_ranks,))
    else:  # neighbours share a replica, to gather within a node if it fits
        names, shape = ("replica", "shard"), (options.num_replicas, num_shards)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return partial(
        fully_shard,
        mesh=mesh,
        shard_placement_fn=partial(_placement, num_shards=num_shards),
        # Left to itself FSDP2 reshards all modules but the root, whose backward pass is the first.
        reshard_after_forward=None if options.reshard_after_forward else False,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=DTYPES[config.compute_dtype], reduce_dtype=torch.float32
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if options.cpu_offload
            else OffloadPolicy()
        ),
    )


def _placement(parameter: nn.Parameter, *, num_shards: int) -> Shard | None:
    """Divide rows of each expert where ranks cannot have equally many experts; None: by dim 0."""
    is_fused = parameter.ndim == 3 and len(parameter) % num_shards > 0
    return Shard(1) if is_fused and parameter.shape[1] % num_shards == 0 else None


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard: the same memory, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Gather the full tensor on every rank; what is wider than ``dtype`` is cast first."""
    tensor = tensor.detach()
    narrow = tensor.dtype if dtype is None or dtype.itemsize >= tensor.dtype.itemsize else dtype
    if not isinstance(tensor, DTensor):
        return tensor.to(narrow)
    return _as_gathered(tensor, narrow).full_tensor()


def _as_gathered(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    local = tensor.to_local()
    gathered = local.to(
        tensor.device_mesh.device_type,
        dtype,
        non_blocking=local.is_pinned(),  # else the host would wait for each shard
    )
    if gathered is local:
        return tensor
    return DTensor.from_local(
        gathered,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def num_copies(tensor: Tensor) -> int:
    """Return the number of ranks that hold the same shard: replicas."""
    if not isinstance(tensor, DTensor):
        return 1
    dims = [dim for dim, placed in enumerate(tensor.placements) if placed.is_replicate()]
    return math.prod(tensor.device_mesh.size(dim) for dim in dims)


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first of the ranks that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return not any(
        coordinate
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def rank_shards(tensor: Tensor) -> RankShards:
    """Describe this rank's shard of a tensor, plain or sharded, for a checkpoint."""
    shard = TensorShard(local_shard(tensor.detach()), ShardSpec.of(tensor))
    return RankShards(tuple(tensor.shape), (shard,), not is_first_copy(tensor))


def stored_shards(
    prefix: str, name: str, parameter: Tensor, values: Tensor, names: StoredNames
) -> dict[str, RankShards]:
    """Return this rank's shards of ``values`` by name in files: a parameter, moment or step count.

    Each matrix of each expert has a name of its own, as megatron-core saves it. A moment is
    sharded as its parameter.
    """
    matrices = names.matrices(name, parameter.shape)
    if not matrices:
        return {prefix + names.stored(name): rank_shards(values)}
    return {prefix + matrix.name: _shards_of(matrix, parameter, values) for matrix in matrices}


def _shards_of(matrix: ExpertMatrix, parameter: Tensor, values: Tensor) -> RankShards:
    local = ShardSpec.of(parameter).range
    rows, columns = (matrix.begin, matrix.end), (0, matrix.num_columns)
    shared = intersect(((matrix.expert, matrix.expert + 1), rows, columns), local)
    shape = tuple(matrix.shape) if values.ndim else ()
    is_copy = not is_first_copy(parameter)
    if shared is None:
        return RankShards(shape, (), is_copy)
    if not shape:
        return RankShards((), (TensorShard(values, ShardSpec((), ())),), is_copy)
    part = local_shard(values.detach())[relative_slices(shared, outer=local)][0]
    offset = (shared[1][0] - matrix.begin, shared[2][0])
    return RankShards(shape, (TensorShard(part, ShardSpec.at(shape, offset, part.shape)),), is_copy)


def compile_blocks(hf: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each block's forward pass, once for all micro-batch sizes; names do not change.

    What mixes tokens is not compiled, attention and layers with a state: its layout differs between
    micro-batches, and each would need a new graph. The hooks of FSDP2 and checkpointing around a
    block are not compiled either.
    """
    keep_attention_eager()
    for mixer in filter(is_recurrent, hf.model.layers.modules()):
        mixer.forward = torch.compiler.disable(mixer.forward)  # type: ignore[no-untyped-call]
    for block in hf.model.layers:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
