"""Models that see: a vision tower turns patches into features, which stand in for tokens.

The parts are transformers'. Of its model with both, the language model and the tower become parts
of one module, by the names that the files of Qwen2.5-VL have: ``model``, ``visual``, ``lm_head``.
So all that knows language models knows these.

Legend: B rows, L tokens of a row, N tokens of all rows, T tokens of a forward pass, K images, X
numbers of a patch, F features, H hidden, I tokens of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    vision_utils,
)

from hybridrl.images import (
    Image,
    Images,
    ImageSettings,
    image_begins,
    patches,
    positions,
    with_identities,
)
from hybridrl.models.varlen import VarlenCall, attend_in_spans

_TOWER_ATTENTION = "hybridrl_tower"
"""Name in transformers' registry. The towers' own attention asks the device for the lengths of its
spans in every block, and calls a kernel for each span: an image, or a window of one."""


@dataclass(frozen=True, slots=True)
class PatchSpans:
    """Patches that see each other lie end to end."""

    lengths: list[int]
    call: VarlenCall  # the same on the device of the patches

    @classmethod
    def between(cls, ends: Tensor, device: torch.device) -> PatchSpans:
        """Take the first patch of each span and the end of the last, int32 on the host."""
        lengths: list[int] = ends.diff().tolist()
        offsets, longest = ends.to(device), max(lengths)
        return cls(lengths, VarlenCall(offsets, offsets, (longest, longest), is_causal=False))


def _attend(
    module: nn.Module,
    query_1NTD: Tensor,
    key_1NTD: Tensor,
    value_1NTD: Tensor,
    _mask: None = None,
    *,
    scaling: float,
    images: PatchSpans,
    windows: PatchSpans,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attend among the T patches of each span; N heads, D numbers of one."""
    spans = windows if module.sees_windows else images
    heads = query_1NTD, key_1NTD, value_1NTD
    if query_1NTD.is_cuda and query_1NTD.dtype.itemsize == 2:  # the kernel takes no others
        query_TND, key_TND, value_TND = (each[0].transpose(0, 1) for each in heads)
        attended_TND = attend_in_spans(query_TND, key_TND, value_TND, own=spans.call, scale=scaling)
        return attended_TND[None], None
    parts = zip(*(torch.split(each, spans.lengths, dim=2) for each in heads), strict=True)
    attended = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(attended, dim=2).transpose(1, 2), None


AttentionInterface.register(_TOWER_ATTENTION, _attend)


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
    for number, block in enumerate(both.visual.blocks):
        windows = hasattr(both.visual, "window_size")
        block.attn.sees_windows = windows and number not in both.visual.fullatt_block_indexes
    if hasattr(both.language_model, "_deepstack_process"):
        both.language_model._deepstack_process = _add_features
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

    patches_NX: Tensor  # float32, of all images end to end
    grid_K3: Tensor  # int64, on the host: frames, and rows and columns of patches
    place_I: Tensor  # int64, the tokens that stand for parts of images
    feature_I: Tensor  # int64, the number of each one's feature among those of all images


@dataclass(frozen=True, slots=True)
class RowImages:
    """The rows of a batch to a model that sees, on the host."""

    settings: ImageSettings
    # of all rows; those of one prompt's responses stand here once a response
    images: Sequence[Image]
    image_N: Tensor  # int64, the number of the image that a token stands for; -1: a word
    part_N: Tensor  # int64, which part of its image a token stands for, from 0
    marked_N: Tensor  # int64, token ids, of images with their identities
    position_3N: Tensor  # int64, time, row and column of each token

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

    def seen(self, index_T: Tensor, device: torch.device) -> SeenImages:
        """Return the images of packed tokens, which stand at ``index_T`` among those of all rows.

        A prompt is packed once, so its images are computed once.
        """
        image_T = self.image_N[index_T]
        place_I = (image_T >= 0).nonzero()[:, 0]
        numbers_K, own_I = torch.unique(image_T[place_I], return_inverse=True)
        images = [self.images[number] for number in numbers_K.tolist()]
        counts_K = torch.tensor([image.num_tokens for image in images], dtype=torch.int64)
        begins_K = counts_K.cumsum(0) - counts_K
        feature_I = begins_K[own_I] + self.part_N[index_T][place_I]
        side, patch = self.settings.side, self.settings.patch
        pixels = [torch.tensor(image.fetch(), device=device) for image in images]
        if not images:
            # One black square whose feature no token has: ranks that share a tower gather its
            # weights together.
            pixels = [torch.zeros(side, side, 3, dtype=torch.uint8, device=device)]
        grids = [(1, len(each) // patch, each.shape[1] // patch) for each in pixels]
        patches_NX = torch.cat([patches(each, self.settings) for each in pixels])
        return SeenImages(patches_NX, torch.tensor(grids), place_I.to(device), feature_I.to(device))


def _tower_inputs(tower: Any, grid_K3: Tensor, device: torch.device) -> Mapping[str, Any]:  # noqa: ANN401
    """Compute on the host what a tower else reads from sizes on the device, waiting for them."""
    merge = tower.spatial_merge_size
    ends = vision_utils.get_vision_cu_seqlens(grid_K3)
    inputs = {
        "grid_thw": grid_K3,
        "position_ids": vision_utils.get_vision_position_ids(grid_K3, merge).to(device),
        "cu_seqlens": ends[[0, -1]],  # transformers makes a call of attention for each span
        "images": PatchSpans.between(ends, device),
        "windows": None,
    }
    if hasattr(tower, "window_size"):
        sizes = (tower.window_size, tower.patch_size)
        order, of_windows = vision_utils.get_vision_window_index(grid_K3, merge, *sizes)
        inputs["window_index"], inputs["cu_window_seqlens"] = order.to(device), ends[[0, -1]]
        inputs["windows"] = PatchSpans.between(of_windows, device)
    if hasattr(tower, "num_grid_per_side"):
        read = {name: values.to(device) for name, values in _read_positions(tower, grid_K3).items()}
        inputs |= read
    return inputs


def _read_positions(tower: Any, grid_K3: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the rows of the learned positions, and their shares, that a patch gets (Qwen3-VL)."""
    sizes = (grid_K3, tower.num_grid_per_side)
    new = getattr(vision_utils, "get_vision_interpolation_indices_and_weights", None)
    if new is None:  # transformers 5.12
        old = vision_utils.get_vision_bilinear_indices_and_weights
        rows, shares = old(*sizes, tower.spatial_merge_size)
        return {"bilinear_indices": rows, "bilinear_weights": shares}
    mode, ends = tower.interpolation_mode, tower.interpolation_align_corners
    rows, shares = new(*sizes, mode, ends, tower.spatial_merge_size)
    return {"interp_indices": rows, "interp_weights": shares}


def _add_features(hidden_1TH: Tensor, place_I: Tensor, features_IH: Tensor) -> Tensor:
    """Take the place of a method of transformers that looks for the places in a mask."""
    return hidden_1TH.index_add(1, place_I, features_IH[None].to(hidden_1TH.dtype))


def seen_inputs(model: PreTrainedModel, token_ids_T: Tensor, seen: SeenImages) -> dict[str, Any]:
    """Compute the tower, and return what the language model gets in place of token ids."""
    tower = model.visual
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    with nullcontext() if is_trained else torch.no_grad():
        inputs = _tower_inputs(tower, seen.grid_K3, seen.patches_NX.device)
        output = tower(seen.patches_NX, **inputs)
    feature_FH, deeper = output.pooler_output, getattr(output, "deepstack_features", None)
    embedded_TH = model.model.embed_tokens(token_ids_T)
    seen_IH = feature_FH[seen.feature_I].to(embedded_TH.dtype)
    embedded_TH = embedded_TH.index_copy(0, seen.place_I, seen_IH)
    if is_trained:  # every rank sends a gradient of the tower, if only zeros
        unused = sum(features.sum() for features in (feature_FH, *(deeper or ())))
        embedded_TH = embedded_TH + (0.0 * unused).to(embedded_TH.dtype)
    embedded: dict[str, Any] = {"inputs_embeds": embedded_TH[None]}
    if deeper:  # features of the tower's middle are added behind the first layers (Qwen3-VL)
        embedded["visual_pos_masks"] = seen.place_I  # see _add_features
        embedded["deepstack_visual_embeds"] = [features[seen.feature_I] for features in deeper]
    return embedded
