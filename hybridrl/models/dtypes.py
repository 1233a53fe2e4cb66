"""The types of numbers that a configuration can name."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name that a configuration has."""
