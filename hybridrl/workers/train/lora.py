"""The training engine with LoRA: only adapters learn, on FSDP2 like the rest of the model.

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.config.model import ModelConfig
from hybridrl.metrics import Max
from hybridrl.models.adapter import Adapter
from hybridrl.models.adapter_names import ADAPTER_NAME, file_name, hf_name, is_adapter_name
from hybridrl.workers.train.adapter_folder import write_adapter_folder
from hybridrl.workers.train.fsdp2 import FSDP2Engine
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.shards import full_tensor


class FSDP2LoraEngine(FSDP2Engine):
    """A frozen policy with an adapter that learns; a ``TrainEngine``.

    Gradients and moments exist for A and B alone, which are float32 whatever the model's type.

    Args:
        model_folder: Hugging Face folder of the frozen model.
        config: types, token budget, chunk size, optimizer.
        model_config: storage type and attention kernel.
        lora: the adapter, and how rollout engines get it.
        seed: of the adapter.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        device: where the model computes.

    Raises:
        ModelError: the folder is not usable, or the adapter does not fit the model.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        lora: LoraConfig,
        seed: int,
        num_total_steps: int,
        device: torch.device,
    ) -> None:
        self._adapter = Adapter(lora, seed=seed)
        if lora.sync == "adapter":
            self.weight_parts = (WeightSet.BASE, WeightSet.ADAPTER)
        super().__init__(
            model_folder,
            config=config,
            model_config=model_config,
            num_total_steps=num_total_steps,
            device=device,
            adapt=self._adapter.inject,
        )
        adapter = self._parameters_of(WeightSet.ADAPTER)
        num_trained = sum(parameter.numel() for _, parameter in adapter)
        self._steps.constants = {"policy/trained_parameters": Max(num_trained)}

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        rename = hf_name if part is WeightSet.BASE else file_name
        return tuple(
            WeightSpec(rename(name), tuple(p.shape), p.numel() * p.element_size())
            for name, p in self._parameters_of(part)
        )

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight of a part whole, one at a time. Every rank must exhaust it.

        With ``lora.sync=merged`` the base has the adapter in it: merged on its way out, one tensor
        at a time, never in the training weights.
        """
        if part is WeightSet.BASE and WeightSet.ADAPTER not in self.weight_parts:
            yield from self._whole_model()
            return
        self._require("full_weights()", TrainState.PARAMETERS)
        rename = hf_name if part is WeightSet.BASE else file_name
        for name, parameter in self._parameters_of(part):
            yield rename(name), full_tensor(parameter)

    def export_adapter(self, folder: Path) -> None:
        """Write a peft folder, atomically; see ``write_adapter_folder``."""
        write_adapter_folder(
            folder,
            self.full_weights(WeightSet.ADAPTER),
            adapter=self._adapter,
            base_model=self._folder,
            ranks=self._ranks,
        )

    def compute_frozen_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows with the adapter switched off: the model as it was loaded."""
        with self._adapter.switched_off():
            return self.compute_logprobs(rows, temperature=temperature)

    def _whole_model(self) -> NamedTensors:
        self._require("full_weights()", TrainState.PARAMETERS)
        parameters = dict(self.model.hf.named_parameters())
        for name, parameter in self._parameters_of(WeightSet.BASE):
            whole = full_tensor(parameter)
            beside = name.removesuffix("base_layer.weight")
            if beside != name:
                matrices = [parameters[f"{beside}lora_{m}.{ADAPTER_NAME}.weight"] for m in "AB"]
                a_RI, b_OR = (full_tensor(matrix) for matrix in matrices)
                whole = self._adapter.merge(whole, a_RI, b_OR)
            yield hf_name(name), whole

    def _parameters_of(self, part: WeightSet) -> list[tuple[str, nn.Parameter]]:
        is_wanted = part is WeightSet.ADAPTER
        named = self.model.hf.named_parameters()
        return [(name, p) for name, p in named if is_adapter_name(name) == is_wanted]
