"""A sample as tensors and other facts: to travel to another process, or to be kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hybridrl.sampler import Sample, SamplingMasks


def parts_of(sample: Sample) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return copies of the tensors of a sample, by name, and all else, in types of JSON.

    A sample with images has facts that JSON cannot hold.
    """
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    masks = values.pop("masks")
    columns = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    columns |= {} if masks is None else masks._asdict()
    facts = {name: value for name, value in values.items() if name not in columns}
    # Several samples may be parts of one tensor, which safetensors refuses.
    copies = {n: v.clone(memory_format=torch.contiguous_format) for n, v in columns.items()}
    return copies, facts


def sample_of(columns: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Sample:
    """Return the sample of ``parts_of``; KeyError or TypeError if these are parts of none."""
    own, masks = {**columns}, None
    if "counts_n" in own:
        masks = SamplingMasks(own.pop("ids_M"), own.pop("counts_n"))
    begins = tuple(facts["sequence_begins"])
    return Sample(**{**facts, "sequence_begins": begins, "masks": masks, **own})
