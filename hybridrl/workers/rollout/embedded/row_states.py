"""States of recurrent layers, one row for each slot: what a KV cache is to attention.

They are transformers' own cache. Unlike keys and values they cannot be cut: a state is that of all
tokens of its row.

Legend: S slots, R rows in use, N rows that move, T tokens of a pass, L tokens of the longest row, H
hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybridrl.models.recurrent import Mix, run_on_rows

KEYWORD = "kv_step"
"""Argument of the model that hands a pass's ``KVStep`` to its layers."""

States = tuple[Tensor, ...]
"""Of all recurrent layers, each [R, ...], in an order that is the same in every pass."""


class RowStates:
    """The states of S slots; of a model that only attends there are none."""

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        self._config = model.config
        mixers = run_on_rows(model, KEYWORD)
        self._layers = [int(mixer.layer_idx) for mixer in mixers]  # type: ignore[arg-type]
        attends = [n for n in range(len(model.model.layers)) if n not in self._layers]
        self.kv_layer = {layer: number for number, layer in enumerate(attends)}
        """By number of a layer that attends: its place in the KV cache."""
        self._cache = self.empty()
        token_S1H = torch.zeros(
            num_slots, 1, model.config.hidden_size, dtype=model.dtype, device=model.device
        )
        with torch.no_grad():  # the layers themselves make states of the right shapes
            for mixer in mixers:
                mixer(token_S1H[:1], kv_step=_EachRow(self._cache, token_S1H))
        self.tensors = self.of(self._cache)
        for tensor in self.tensors:
            tensor.zero_()

    def empty(self) -> DynamicCache | None:
        """Return transformers' cache for contexts; None if no layer needs one."""
        return DynamicCache(config=self._config) if self._layers else None

    def of(self, cache: DynamicCache | None) -> States:
        """Return the states that a pass left in a cache."""
        return tuple(states[key] for states, key in self._places(cache))

    def of_rows(self, num_rows: int) -> DynamicCache | None:
        """Return the cache whose states are views of the first R slots."""
        for (states, key), tensor in zip(self._places(self._cache), self.tensors, strict=True):
            states[key] = tensor[:num_rows]
        return self._cache

    def place(self, first_row: int, states: States, row_N: Tensor) -> None:
        """Copy rows of prefilled states to N slots from ``first_row`` on."""
        for tensor, prefilled in zip(self.tensors, states, strict=True):
            tensor[first_row : first_row + len(row_N)] = prefilled[row_N]

    def move(self, from_N: Tensor, to_N: Tensor) -> None:
        """Copy slots over others; a slot may be in both."""
        for tensor in self.tensors:
            tensor[to_N] = tensor[from_N]

    def _places(self, cache: DynamicCache | None) -> Iterator[tuple[MutableMapping[Any, Any], Any]]:
        """Yield where a cache keeps each state: a layer's attribute, or entries of it."""
        for layer in self._layers:
            attributes = cache.layers[layer].__dict__  # type: ignore[union-attr]
            for name in ("conv_states", "recurrent_states"):
                if isinstance(attributes[name], dict):  # from transformers 5.19 on
                    yield from ((attributes[name], number) for number in attributes[name])
                else:
                    yield attributes, name


class _EachRow:
    """Gives a layer one token for each row."""

    def __init__(self, cache: DynamicCache | None, token_S1H: Tensor) -> None:
        self._cache = cache
        self._token_S1H = token_S1H

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """Let the layer make its states; see ``RowsOfTokens``."""
        mix(hidden_states=self._token_S1H, cache_params=self._cache)
        return hidden_TH


def mix_contexts(
    mix: Mix, hidden_TH: Tensor, cache: DynamicCache | None, row_T: Tensor, place_T: Tensor
) -> Tensor:
    """Run a layer on contexts laid end to end, and leave its last states in the cache.

    Rows are padded on the left, where transformers masks: so the state behind the last column is
    that of the last token.
    """
    count_R = row_T.bincount()
    longest = int(count_R.max())
    column_T = longest - count_R[row_T] + place_T
    rows_RLH = hidden_TH.new_zeros(len(count_R), longest, hidden_TH.shape[1])
    rows_RLH[row_T, column_T] = hidden_TH
    mask_RL = row_T.new_zeros(len(count_R), longest)
    mask_RL[row_T, column_T] = 1
    mixed_RLH = mix(hidden_states=rows_RLH, cache_params=cache, attention_mask=mask_RL)
    return mixed_RLH[row_T, column_T]
