"""LoRA on a Hugging Face model, through peft (arXiv:2106.09685). The only module that imports peft.

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.config.model import LoraConfig
from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import (
    ADAPTER_NAME,
    WEIGHTS_FILE,
    file_name,
    hf_name,
    is_adapter_name,
    is_in_tower,
    name_beside_tower,
)
from hybridrl.models.load import WeightSource, require_finite
from hybridrl.models.seeing import sees


class Adapter:
    """The adapter of one model: made before the model has memory, filled and sharded with it.

    ``adapts_tower`` puts A and B beside all linear layers of a vision tower, too.
    """

    def __init__(self, config: LoraConfig, *, seed: int, adapts_tower: bool = False) -> None:
        self.config = config
        self._seed = seed
        self._adapts_tower = adapts_tower
        self._sees = False
        self._layers: list[LoraLayer] = []
        self._settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.use_rslora,
            lora_dropout=0.0,
            bias="none",
            target_modules=list(config.modules),
            task_type="CAUSAL_LM",
        )

    def inject(self, hf: PreTrainedModel, weights: WeightSource) -> WeightSource:
        """Freeze an empty model and put A and B, in float32, beside each adapted layer.

        Returns:
            Weights of the model with adapters, by its parameters' new names.
        """
        linear = {name: m for name, m in hf.named_modules() if isinstance(m, nn.Linear)}
        sizes = {name: (layer.out_features, layer.in_features) for name, layer in linear.items()}
        self.check_fit(sizes, model=type(hf).__name__)
        self._sees = sees(hf)
        if self._sees and self._adapts_tower:
            self._settings.target_modules |= set(filter(is_in_tower, linear))
        elif self._sees:
            self._settings.exclude_modules = r".*\bvisual\..*"  # some towers have a gate_proj
        peft.inject_adapter_in_model(
            self._settings, hf, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=True
        )
        self._layers = [module for module in hf.modules() if isinstance(module, LoraLayer)]
        return _AdaptedWeights(weights, self.initial_values())

    def initial_values(self) -> WeightSource:
        """Return the first values of A and B, full matrices by their names within peft's model.

        A drawn matrix depends only on the seed and its name, so all ranks draw the same.
        """
        folder = self.config.init_from
        if folder is None:
            return _DrawnAdapter(self._seed)
        return _StoredAdapter(Path(folder) / WEIGHTS_FILE, self.name_in_file)

    def name_in_file(self, name: str) -> str:
        """Return a matrix' name in the file by that of rollout engines."""
        return name_beside_tower(name) if self._sees else name

    def check_fit(self, layers: Mapping[str, tuple[int, int]], *, model: str) -> None:
        """Check the ``lora`` section against a model; config/checks/model.py reads config.json.

        ``layers`` has outputs and inputs of its linear layers by their names.
        """
        missing = set(self.config.modules)
        for name, (outputs, inputs) in layers.items():
            leaf = name.rpartition(".")[2]
            is_of_tower = is_in_tower(name)
            if not (self._adapts_tower if is_of_tower else leaf in self.config.modules):
                continue
            missing.discard(leaf)
            limit = min(inputs, outputs)
            if self.config.rank > limit:
                raise ModelError(
                    f"lora.rank={self.config.rank} is larger than {name}, "
                    f"{inputs} inputs and {outputs} outputs; set lora.rank={limit}"
                )
        if missing:
            raise ModelError(
                f"lora.target_modules contains {', '.join(sorted(missing))}, and {model} has no "
                "such linear layer; set lora.target_modules=[all-linear]"
            )

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute as the frozen model inside the ``with``."""
        # Not peft's enable_adapters(): it changes requires_grad, which FSDP2 and the optimizer have
        # read before. A forward pass reads this flag first.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def merge(self, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        """Return ``W + scaling B A`` [O, I] in W's type, computed in float32; W stays as it is."""
        return torch.addmm(
            weight_OI.float(), b_OR.float(), a_RI.float(), alpha=self.config.scaling
        ).to(weight_OI.dtype)

    def save_settings(self, folder: Path, *, base_model: Path) -> None:
        """Write ``adapter_config.json``, from which peft locates the layers."""
        self._settings.base_model_name_or_path = str(base_model)
        self._settings.save_pretrained(str(folder))


@dataclass(frozen=True, slots=True)
class _AdaptedWeights:
    """Frozen weights by their Hugging Face names, and the adapter's first values."""

    weights: WeightSource
    initial: WeightSource

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        source = self.initial if is_adapter_name(name) else self.weights
        return source.read(hf_name(name), shape=shape)


@dataclass(frozen=True, slots=True)
class _DrawnAdapter:
    """B is 0; A is drawn as peft does, with a generator of its own: all ranks draw the same."""

    seed: int

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        values = torch.zeros(shape)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"lora {self.seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values


@dataclass(frozen=True, slots=True)
class _StoredAdapter:
    """The tensors of a peft folder."""

    file: Path
    name_in_file: Callable[[str], str]

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        stored = self.name_in_file(file_name(name))
        try:
            with safe_open(self.file, framework="pt") as tensors:
                values: Tensor = tensors.get_tensor(stored)
        except (SafetensorError, OSError) as err:
            raise ModelError(
                f"{self.file}: {stored} cannot be read: {err}; set lora.init_from to a "
                "folder for this model and these lora.target_modules"
            ) from err
        if values.shape != shape:
            raise ModelError(
                f"{self.file}: {stored} is {list(values.shape)}, and this model with "
                f"lora.rank needs {list(shape)}; set lora.init_from to an adapter of that shape"
            )
        values = values.float()
        fix = "set lora.init_from to another adapter, or to null for a new one"
        require_finite(values, name=stored, file=self.file, fix=fix)
        return values
