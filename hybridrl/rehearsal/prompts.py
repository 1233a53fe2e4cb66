"""The prompts of a rehearsal: as long as a run allows, and full of images if the model sees."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hybridrl.batch import PromptBatch, jagged, objects
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.images import Image, Images, ImageSettings
from hybridrl.models.architecture import architecture_of
from hybridrl.models.image_settings import read_image_settings


def longest_prompts(config: ExperimentConfig, num_prompts: int) -> PromptBatch:
    """Return prompts of ``data.max_prompt_tokens``; the model is a hollow folder."""
    settings = read_image_settings(Path(config.model.path or ""))
    index_P = torch.arange(num_prompts)
    tokens_PL = torch.ones(num_prompts, config.data.max_prompt_tokens, dtype=torch.int64)
    images_P = None
    if settings is None:  # no two prompts are equal: they would be computed once
        tokens_PL[:, 0] += index_P % (architecture_of(config.model).vocab_size - 1)
    else:
        images = [_fill(tokens_PL.shape[1], settings, number) for number in range(num_prompts)]
        tokens_PL[:, : sum(image.num_tokens for image in images[0])] = settings.placeholder
        images_P = objects(images)
    return PromptBatch(
        token_ids_PL=jagged(tokens_PL.unbind()),
        prompt_index_P=index_P,
        seed_P=index_P,
        images_P=images_P,
        batch_size=[num_prompts],
    )


def _fill(num_tokens: int, settings: ImageSettings, prompt: int) -> Images:
    """Return as many of the largest square images as so many tokens hold: a prompt's own ones."""
    most = min(settings.max_pixels, num_tokens * settings.side**2)
    if most < settings.min_pixels:
        return ()
    side = math.isqrt(most)
    height, width = replace(settings, max_pixels=most).fit(side, side)
    rows, columns = height // settings.side, width // settings.side
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    count = num_tokens // (rows * columns)
    identities = range(1 + prompt * count, 1 + (prompt + 1) * count)
    return tuple(Image(rows, columns, identity, pixels) for identity in identities)
