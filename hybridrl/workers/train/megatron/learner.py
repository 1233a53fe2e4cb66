"""What learns of this rank's stages on megatron-core: gradient buffers, masters and moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from hybridrl.config.actor import EngineConfig
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.masters import fill_masters
from hybridrl.workers.train.megatron.megatron_core import (
    DistributedDataParallel,
    ProcessGroupCollection,
    finalize_model_grads,
)
from hybridrl.workers.train.megatron.optimizer import DistributedAdamW
from hybridrl.workers.train.megatron.stages import Stages
from hybridrl.workers.train.megatron.training import ddp_config
from hybridrl.workers.train.megatron.transformer import Duty


class StageLearner:
    """The optimizer of a model, and the buffers in which its gradients are summed.

    Args:
        stages: without values; their parameters move into the buffers, and are filled there.
        folder: the Hugging Face folder that the model comes from.
        config: types and optimizer.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        duty: what of the model learns.

    Raises:
        ConfigError: megatron-core refuses ``megatron.ddp_args`` or ``optimizer_args``.
    """

    replicas: list[nn.Module]
    """What computes with gradient: each of the stages, in its buffers."""

    optimizer: DistributedAdamW
    """Moments, and the number of steps taken."""

    def __init__(
        self,
        stages: Stages,
        folder: Path,
        *,
        config: EngineConfig,
        num_total_steps: int,
        duty: Duty,
    ) -> None:
        self._stages = stages
        replicas = self._sum_gradients_of(stages, config, duty=duty)
        self.replicas = [*replicas]
        stages.fill(folder)
        self.optimizer = DistributedAdamW(
            replicas, config=config, num_total_steps=num_total_steps, parallel=stages.parallel
        )
        fill_masters(
            self.optimizer,
            WeightFiles(folder),
            names={parameter: name for name, parameter in stages.named_tensors()},
            architecture=stages.architecture,
            parallel=stages.parallel.rank,
        )

    def state_besides_weights(self) -> list[Tensor]:
        """Return this rank's masters and moments on the device, one tensor of each storage.

        In float32 a weight is its own master, and no part of the optimizer's memory. Those that
        ``optimizer_cpu_offload`` keeps lie on the host already.
        """
        weights = [parameter.detach() for _, parameter in self._stages.named_tensors()]
        of_weights = {tensor.untyped_storage()._cdata for tensor in weights}
        by_storage = {
            tensor.untyped_storage()._cdata: tensor.detach()
            for tensor in self.optimizer.state_tensors()
            if tensor.device.type == self._stages.parallel.device.type
        }
        return [tensor for storage, tensor in by_storage.items() if storage not in of_weights]

    def _sum_gradients_of(
        self, stages: Stages, config: EngineConfig, *, duty: Duty
    ) -> list[DistributedDataParallel]:
        """Move parameters into flat buffers, and let megatron-core sum their gradients."""
        parallel, transformer = stages.parallel, stages.transformer
        ddp = ddp_config(config, parallel.config, parallel.device, duty=duty)
        replicas = [
            DistributedDataParallel(
                config=transformer, ddp_config=ddp, module=model, disable_bucketing=number > 0
            )
            for number, model in enumerate(stages.models)
        ]
        transformer.finalize_model_grads_func = _sum_gradients
        if ddp.overlap_grad_reduce:
            no_sync = [replica.no_sync for replica in replicas]
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return replicas


def _sum_gradients(
    models: Sequence[nn.Module],
    _num_tokens: Tensor | None,
    *,
    pg_collection: ProcessGroupCollection,
    force_all_reduce: bool,
) -> None:
    """Add gradients of all ranks, and divide them by nothing: the last act of a backward pass."""
    finalize_model_grads(
        models, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
