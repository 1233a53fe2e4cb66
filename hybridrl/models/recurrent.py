"""Layers whose state goes from token to token: delta rules and state spaces of transformers.

On packed rows that state would cross the ends of rows: transformers' own torch code ignores the
keywords that name these ends, and its convolution has none. So such a layer is given rows.

Legend: T tokens end to end, R rows, L tokens of the longest row, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import transformers
from torch import Tensor, nn

from hybridrl.errors import ModelError

Mix = Callable[..., Tensor]
"""A layer's own pass: ``hidden_states`` [R, L, H], and transformers' ``cache_params`` and
``attention_mask``, to [R, L, H]."""


class RowsOfTokens(Protocol):
    """Knows the rows of the tokens that go through a model."""

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """Run a recurrent layer on each row by itself; returns float [T, H]."""
        ...


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module mixes tokens by a state: all such have a depthwise convolution before it."""
    children = module.children()
    return any(isinstance(each, nn.Conv1d) and each.groups > 1 for each in children)


def run_on_rows(model: nn.Module, keyword: str) -> list[nn.Module]:
    """Let the recurrent layers of a model run on rows, and return them.

    ``keyword`` is the argument of the model by which its caller gives the ``RowsOfTokens``.
    """
    mixers = [module for module in model.modules() if is_recurrent(module)]
    for mixer in mixers:
        mixer.forward = partial(_on_rows, mixer.forward, keyword)
    return mixers


def _on_rows(mix: Mix, keyword: str, hidden_states: Tensor, **keywords: object) -> Tensor:
    rows = keywords.get(keyword)
    if rows is None:
        raise ModelError(
            f"transformers {transformers.__version__} does not hand {keyword} down to recurrent "
            "layers of this model, which would then mix rows; type: pip install -U transformers"
        )
    return rows.mix(mix, hidden_states[0])[None]  # type: ignore[attr-defined, no-any-return]
