"""Experts of a mixture: two parameters a layer in transformers, a tensor for each matrix in files.

Transformers multiplies all experts of a layer at once, by ``mlp.experts.gate_up_proj`` [E, 2I, H]
and ``mlp.experts.down_proj`` [E, H, I]. In Hugging Face folders, rollout engines and checkpoints
each matrix of each expert has a name of its own, and these are slices of the parameters: views.

Legend: E experts, I inputs of an expert's last matrix, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridrl.models.families import FAMILIES

_BLOCK = ".mlp."  # of transformers: the module that has the router and the experts


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix of one expert: rows of a fused parameter."""

    name: str  # in files
    expert: int
    begin: int
    end: int
    num_columns: int

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size((self.end - self.begin, self.num_columns))

    def of(self, fused: Tensor) -> Tensor:
        """Return its view of the full parameter."""
        return fused[self.expert, self.begin : self.end]


class StoredNames:
    """Names of a model's tensors in files, and in everything that takes tensors by these names."""

    def __init__(self, model_type: str) -> None:
        self._experts = FAMILIES[model_type].expert_names
        self._renames = FAMILIES[model_type].renames
        self._is_transposed = FAMILIES[model_type].has_transposed_experts
        self._has_fused_files = FAMILIES[model_type].has_fused_experts or self._is_transposed

    def stored(self, name: str) -> str:
        """Return the name in files of a parameter that is no fused one."""
        for part, part_in_files in self._renames.items():
            name = name.replace(part, part_in_files)
        return name.replace(_BLOCK, f".{self._experts.block}.")

    def turned(self, name: str, full: Tensor) -> Tensor:
        """Return a view of a parameter as files have it, or of a tensor in files as models do."""
        is_turned = self._is_transposed and f"{_BLOCK}experts." in name
        return full.transpose(1, 2) if is_turned else full

    def turned_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the shape of a parameter's ``turned`` view."""
        return self.turned(name, torch.empty(shape, device="meta")).shape

    def matrices(self, name: str, shape: torch.Size) -> tuple[ExpertMatrix, ...]:
        """Return the matrices of a fused parameter; none of another parameter."""
        module, _, leaf = name.rpartition(".")
        is_fused = module.endswith(f"{_BLOCK}experts") and leaf in ("gate_up_proj", "down_proj")
        if not is_fused or self._has_fused_files:
            return ()
        num_experts, num_rows, num_columns = shape
        names = self._experts
        kinds = [names.gate, names.up] if leaf == "gate_up_proj" else [names.down]
        size = num_rows // len(kinds)
        return tuple(
            ExpertMatrix(
                f"{self.stored(module)}.{expert}.{kind}.weight",
                expert,
                number * size,
                (number + 1) * size,
                num_columns,
            )
            for expert in range(num_experts)
            for number, kind in enumerate(kinds)
        )

    def shapes(self, name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Size]]:
        """Yield the tensors in files of a parameter: names and shapes."""
        matrices = self.matrices(name, shape)
        if not matrices:
            yield self.stored(name), self.turned_shape(name, shape)
        for matrix in matrices:
            yield matrix.name, matrix.shape

    def views(self, name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors with their values, views of the full parameter."""
        matrices = self.matrices(name, full.shape)
        if not matrices:
            yield self.stored(name), self.turned(name, full)
        for matrix in matrices:
            yield matrix.name, matrix.of(full)

    def tensors(self, model: nn.Module, *, tied_again: bool = False) -> dict[str, Tensor]:
        """Return the parameters of a model by their names in files, views of the live memory.

        With ``tied_again`` a tensor that has several names stands under each of them.
        """
        named = model.named_parameters(remove_duplicate=not tied_again)
        return {stored: view for name, p in named for stored, view in self.views(name, p)}
