"""Rows with images for tests, and what transformers alone computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from hybridrl.batch import (
    RolloutBatch,
    TrainBatch,
    jagged,
    objects,
    spread_over_tokens,
)
from hybridrl.config.model import ATTENTION_LINEAR, LoraConfig
from hybridrl.images import Image, Images, ImageSettings, patches
from hybridrl.models.image_settings import read_image_settings
from hybridrl.models.model_folder import own_name
from hybridrl.sampler import Sample
from tests.seeing import VISION_END, VISION_START, Kind, make_seeing_folder
from tests.trainer import rollouts
from tests.workers.train.lora_engines import LORA

WORD = 40


def settings_of(folder: Path) -> ImageSettings:
    settings = read_image_settings(folder)
    assert settings is not None
    return settings


def seeing_model(folder: Path, kind: Kind) -> tuple[Path, ImageSettings]:
    make_seeing_folder(folder, kind)
    return folder, settings_of(folder)


def draw_image(settings: ImageSettings, rows: int, columns: int, *, seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows * settings.side, columns * settings.side, 3)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return Image(rows, columns, 1 + seed, pixels.numpy())


def lora_of(kind: Kind, **changes: Any) -> LoraConfig:
    """Adapt all layers that can be: one product computes all experts of a layer."""
    names = ATTENTION_LINEAR if kind.endswith("moe") else LORA.target_modules
    return replace(LORA, target_modules=names, **changes)


def prompt_with(images: Sequence[Image], settings: ImageSettings) -> list[int]:
    tokens = [20, 21]
    for image in images:
        tokens += [VISION_START, *[settings.placeholder] * image.num_tokens, VISION_END, WORD]
    return [*tokens, 41]


def draw_rows(settings: ImageSettings) -> tuple[TrainBatch, list[Images]]:
    """Rows without and with one to three images of several sizes; the first two share a prompt.

    Two others have prompts of equal tokens, and other pixels.
    """
    one, tall, small, other = (
        draw_image(settings, *size, seed=seed)
        for seed, size in enumerate([(2, 3), (4, 2), (1, 1), (1, 1)], 7)
    )
    images: list[Images] = [
        (one, tall),
        (one, tall),
        (),
        (small,),
        (one, small, tall),
        (),
        (other,),
    ]
    generator = torch.Generator().manual_seed(0)
    rows, masks = [], []
    for number, of_row in enumerate(images):
        prompt = prompt_with(of_row, settings)
        response = torch.randint(50, 400, (4 + number,), generator=generator).tolist()
        rows.append(torch.tensor([*prompt, *response]))
        masks.append(torch.arange(len(rows[-1])) >= len(prompt))
    mask_BL = jagged(masks)
    advantages_B = torch.randn(len(rows), generator=generator)
    batch = TrainBatch(
        token_ids_BL=jagged(rows),
        response_mask_BL=mask_BL,
        advantages_BL=spread_over_tokens(advantages_B, mask_BL),
        sampler_logprobs_BL=spread_over_tokens(torch.full((len(rows),), -5.0), mask_BL),
        images_B=objects(images),
        batch_size=[len(rows)],
    )
    return batch, images


def load_plain(folder: Path) -> PreTrainedModel:
    """The folder's model as transformers alone computes it."""
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")


def plain_logprobs(
    model: PreTrainedModel, row_L: Tensor, images: Images, settings: ImageSettings
) -> Tensor:
    """Log-probs of all tokens but the first, float32 [L - 1]."""
    inputs = {}
    if images:
        grids = [(1, i.rows * settings.merge, i.columns * settings.merge) for i in images]
        cut = [patches(torch.tensor(image.fetch()), settings) for image in images]
        inputs = {
            "pixel_values": torch.cat(cut),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (row_L == settings.placeholder).int()[None],
        }
    logits = model(row_L[None], **inputs).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, row_L[1:, None])[:, 0]


def all_plain_logprobs(
    model: PreTrainedModel, batch: TrainBatch, images: Sequence[Images], settings: ImageSettings
) -> Tensor:
    """Log-probs of the batch's response tokens, float32 [S] in the order of its rows."""
    rows = zip(batch.token_ids_BL.unbind(), batch.response_mask_BL.unbind(), images, strict=True)
    return torch.cat(
        [plain_logprobs(model, row, of_row, settings)[mask[1:]] for row, mask, of_row in rows]
    )


def gradients(model: torch.nn.Module, *, is_plain: bool) -> dict[str, Tensor]:
    """Gradients by the names that the trainer has."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if is_plain:
        return {str(own_name(name, sees=True)): grad for name, grad in named.items()}
    return named


def rollouts_of(answered: Sequence[tuple[Sequence[int], Images, Sample]]) -> RolloutBatch:
    """Make a batch of what an engine sampled: contexts, their images, and responses."""
    rows = [torch.cat([torch.tensor(context), s.token_ids]) for context, _, s in answered]
    masks = [torch.arange(len(r)) >= len(c) for r, (c, _, _) in zip(rows, answered, strict=True)]
    logprobs = [torch.cat([torch.zeros(len(context)), s.logprobs]) for context, _, s in answered]
    return rollouts.rollouts_of(
        rows,
        masks,
        [0] * len(rows),
        sampler_logprobs_BL=jagged(logprobs),
        images_B=objects([images for _, images, _ in answered]),
    )
