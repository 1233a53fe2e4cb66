"""Models that see: a vision tower turns patches into features, which stand in for tokens.

The parts are transformers'. Of its model with both, the language model and the tower become parts
of one module, by the names that the files of Qwen2.5-VL have: ``model``, ``visual``, ``lm_head``.
So all that knows language models knows these.

Legend: B rows, L tokens of a row, N tokens of all rows, T tokens of a forward pass, K images, X
numbers of a patch, F features, H hidden, I tokens of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from hybridrl.images import (
    Image,
    Images,
    ImageSettings,
    image_begins,
    patches,
    positions,
    with_identities,
)

_TOWER_ATTENTION = "sdpa"


def build_seeing_model(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Build language model and tower as one module, on torch's current device.

    ``attention`` is transformers' name of the language model's.
    """
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config,
        dtype=dtype,
        attn_implementation={"text_config": attention, "vision_config": _TOWER_ATTENTION},
    )
    both = model.model
    model.model, model.visual = both.language_model, both.visual
    is_tied = config.tie_word_embeddings
    model.config = both.language_model.config  # which has the sizes that others ask for
    model.config.tie_word_embeddings = is_tied
    return model


def sees(model: PreTrainedModel) -> bool:
    """Whether a model has a tower."""
    return hasattr(model, "visual")


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The images of a forward pass, on its device."""

    patches_NX: Tensor
    """float32, of all images end to end."""

    grid_K3: Tensor
    """int64: frames, and rows and columns of patches."""

    feature_T: Tensor
    """int64, the number of each token's feature among those of all images; -1: a word."""


@dataclass(frozen=True, slots=True)
class RowImages:
    """The rows of a batch to a model that sees, on the host."""

    settings: ImageSettings

    images: Sequence[Image]
    """Of all rows; those of one prompt's responses stand here once a response."""

    image_N: Tensor
    """int64, the number of the image that a token stands for; -1: a word."""

    part_N: Tensor
    """int64, which part of its image a token stands for, from 0."""

    marked_N: Tensor
    """int64, token ids, of images with their identities."""

    position_3N: Tensor
    """int64, time, row and column of each token."""

    @classmethod
    def of(
        cls,
        token_ids_BL: Tensor,
        images_B: Sequence[Images],
        settings: ImageSettings,
        lengths_R: Tensor | None = None,
    ) -> RowImages:
        """Locate the images of each row; the rows of a batch without any have none.

        ``lengths_R`` are those of sequences, whose positions begin at 0; None: rows are sequences.
        """
        token_ids_N, begins_B = token_ids_BL.values(), token_ids_BL.offsets()  # type: ignore[attr-defined]
        marked_N, image_N = token_ids_N.clone(), torch.full_like(token_ids_N, -1)
        part_N = torch.zeros_like(token_ids_N)
        position_3N = torch.arange(len(token_ids_N)).expand(3, -1).clone()
        images: list[Image] = []
        for row, of_row in enumerate(images_B):
            if not of_row:
                continue
            own = slice(int(begins_B[row]), int(begins_B[row + 1]))
            row_L = token_ids_N[own]
            begins = image_begins(row_L, of_row, settings.placeholder)
            marked_N[own] = with_identities(row_L, of_row, begins)
            position_3N[:, own] = positions(len(row_L), of_row, begins)
            for image, begin in zip(of_row, begins, strict=True):
                first = own.start + begin
                image_N[first : first + image.num_tokens] = len(images)
                part_N[first : first + image.num_tokens] = torch.arange(image.num_tokens)
                images.append(image)
        lengths_R = begins_B.diff() if lengths_R is None else lengths_R
        begin_N = (lengths_R.cumsum(0) - lengths_R).repeat_interleave(lengths_R)
        position_3N -= position_3N[0, begin_N]
        return cls(settings, images, image_N, part_N, marked_N, position_3N)

    def seen(self, index_T: Tensor, *, num_padding: int, device: torch.device) -> SeenImages:
        """Return the images of packed tokens, which stand at ``index_T`` among those of all rows.

        A prompt is packed once, so its images are computed once.
        """
        image_T = self.image_N[index_T]
        is_image_T = image_T >= 0
        numbers_K, own_I = torch.unique(image_T[is_image_T], return_inverse=True)
        images = [self.images[number] for number in numbers_K.tolist()]
        counts_K = torch.tensor([image.num_tokens for image in images], dtype=torch.int64)
        feature_T = torch.full_like(image_T, -1)
        begins_K = counts_K.cumsum(0) - counts_K
        feature_T[is_image_T] = begins_K[own_I] + self.part_N[index_T][is_image_T]
        feature_T = pad(feature_T, (0, num_padding), value=-1)
        return _lay_out_images(images, feature_T, self.settings, device)


def _lay_out_images(
    images: Sequence[Image], feature_T: Tensor, settings: ImageSettings, device: torch.device
) -> SeenImages:
    """Fetch the pixels of images and cut them into patches.

    Without images there is one black square whose feature no token has: ranks that share a tower
    gather its weights together.
    """
    pixels = [torch.tensor(image.fetch(), device=device) for image in images]
    if not images:
        pixels = [torch.zeros(settings.side, settings.side, 3, dtype=torch.uint8, device=device)]
    grids = [(1, len(each) // settings.patch, each.shape[1] // settings.patch) for each in pixels]
    return SeenImages(
        torch.cat([patches(each, settings) for each in pixels]),
        torch.tensor(grids, device=device),
        feature_T.to(device),
    )


def seen_inputs(model: PreTrainedModel, token_ids_T: Tensor, seen: SeenImages) -> dict[str, Any]:
    """Compute the tower, and return what the language model gets in place of token ids."""
    tower = model.visual
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    with nullcontext() if is_trained else torch.no_grad():
        output = tower(seen.patches_NX, grid_thw=seen.grid_K3)
    feature_FH, deeper = output.pooler_output, getattr(output, "deepstack_features", None)
    is_image_T = seen.feature_T >= 0
    feature_I = seen.feature_T[is_image_T]
    embedded_TH = model.model.embed_tokens(token_ids_T)
    seen_IH = feature_FH[feature_I].to(embedded_TH.dtype)
    embedded_TH = embedded_TH.index_copy(0, is_image_T.nonzero()[:, 0], seen_IH)
    if is_trained:  # every rank sends a gradient of the tower, if only zeros
        unused = sum(features.sum() for features in (feature_FH, *(deeper or ())))
        embedded_TH = embedded_TH + (0.0 * unused).to(embedded_TH.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": embedded_TH[None]}
    if deeper:  # features of the tower's middle are added behind the first layers (Qwen3-VL)
        inputs["visual_pos_masks"] = is_image_T[None]
        inputs["deepstack_visual_embeds"] = [features[feature_I] for features in deeper]
    return inputs
