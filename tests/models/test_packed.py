from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.errors import ModelError
from hybridrl.models.load import (
    ModelFiles,
    WeightFiles,
    build_empty_model,
    fill_weights,
    finish_model,
)
from hybridrl.models.packed_attention import AttentionKernel, PaddedLayout, Segment, build_layout
from hybridrl.models.packed_model import PackedTokens, PolicyModel
from tests.tiny_models import TRAINED, Family, make_tiny_model

Record = Callable[[str, object], None]
CPU = torch.device("cpu")
LENGTHS = [13, 12, 5, 4, 4, 1]  # descending, as the planner packs: three buckets
SHUFFLED = [4, 13, 1, 5, 12, 4]  # any order must be right
SHUFFLED_BY_DAY = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text")
"""Families without and with a window, with sinks, and with a state."""


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = build_empty_model(folder, dtype=dtype)
    fill_weights(model, "", ModelFiles(WeightFiles(folder), model.config.model_type), CPU)
    finish_model(model, CPU)
    return model


def draw_rows(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (length + 1,), generator=generator) for length in lengths]


def pack(
    rows: list[Tensor], *, kernel: AttentionKernel = "padded", device: torch.device = CPU
) -> PackedTokens:
    """Score every token but the first of each row."""
    lengths = [len(row) - 1 for row in rows]
    return PackedTokens(
        token_ids_T=torch.cat([row[:-1] for row in rows]).to(device),
        positions_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        layout=build_layout([Segment(n) for n in lengths], kernel=kernel, device=device),
        scored_S=torch.arange(sum(lengths), device=device),
        targets_S=torch.cat([row[1:] for row in rows]).to(device),
    )


def plain_logprobs(model: PreTrainedModel, row: Tensor) -> Tensor:
    all_logprobs = torch.log_softmax(model(row[None, :-1]).logits[0].float(), dim=-1)
    return all_logprobs.gather(1, row[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "tie_embeddings", "lengths"),
    [
        *((family, True, LENGTHS) for family in TRAINED),
        *((family, False, SHUFFLED) for family in SHUFFLED_BY_DAY),
        *(
            pytest.param(family, False, SHUFFLED, marks=pytest.mark.nightly)
            for family in TRAINED
            if family not in SHUFFLED_BY_DAY
        ),
        ("qwen3", True, [7]),
    ],
)
def test_packed_rows_equal_single_rows(
    tmp_path: Path,
    family: Family,
    tie_embeddings: bool,
    lengths: list[int],
    record_property: Record,
) -> None:
    folder = make_tiny_model(tmp_path, family, tie_embeddings=tie_embeddings)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    packed = load(folder)
    rows = draw_rows(lengths)
    weights_T = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))

    expected_T = torch.cat([plain_logprobs(plain, row) for row in rows])
    logprobs_T, _ = PolicyModel(packed, chunk_tokens=7)(pack(rows), 1.0)
    torch.testing.assert_close(logprobs_T, expected_T, atol=1e-5, rtol=0)
    record_property("packed", float((logprobs_T - expected_T).detach().abs().max()))

    (expected_T * weights_T).sum().backward()
    (logprobs_T * weights_T).sum().backward()
    expected_grads, grads = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for model in (plain, packed)
    )
    assert list(grads) == list(expected_grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=5e-5, rtol=1e-4, msg=name)
    largest = max(float(grad.abs().max()) for grad in expected_grads.values())
    apart = max(float((grads[name] - grad).abs().max()) for name, grad in expected_grads.items())
    record_property("gradient", apart / largest)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows_of_some_or_all_layers_are_those_of_transformers(
    tmp_path: Path, family: Family
) -> None:
    late: dict[str, Any] = (
        {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    )
    folder = make_tiny_model(tmp_path, family, sliding_window=5, **late)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = draw_rows(LENGTHS)
    expected_T = torch.cat([plain_logprobs(plain, row) for row in rows])
    logprobs_T, _ = PolicyModel(load(folder), chunk_tokens=64)(pack(rows), 1.0)
    torch.testing.assert_close(logprobs_T, expected_T, atol=1e-5, rtol=0)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"sliding_window": 5', '"sliding_window": 99'))
    unlimited_T, _ = PolicyModel(load(folder), chunk_tokens=64)(pack(rows), 1.0)
    assert (unlimited_T - expected_T).abs().max() > 0.01


def test_a_bucket_holds_rows_of_similar_length() -> None:
    layout = cast(
        "PaddedLayout", build_layout([Segment(n) for n in LENGTHS], kernel="padded", device=CPU)
    )
    assert [(b.num_segments, b.num_columns) for b in layout.buckets] == [(2, 13), (3, 5), (1, 1)]
    assert len(layout.slot_of_token) == sum(LENGTHS)
    assert layout.longest_row == 13


def test_a_mask_would_be_refused_instead_of_ignored(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path))
    tokens = pack(draw_rows([4]))
    with pytest.raises(ModelError, match="got a mask of shape"):
        model.model(
            input_ids=tokens.token_ids_T[None],
            attention_mask=torch.zeros(1, 1, 4, 4),
            pack_layout=tokens.layout,
        )


@pytest.mark.gpu
def test_the_varlen_kernel_agrees_with_the_padded_one(tmp_path: Path) -> None:
    device = torch.device("cuda")
    model = load(make_tiny_model(tmp_path), dtype=torch.bfloat16).to(device)
    policy = PolicyModel(model, chunk_tokens=64)
    rows = draw_rows(LENGTHS)
    grads = []
    for kernel in ("padded", "varlen"):
        logprobs_T, _ = policy(pack(rows, kernel=kernel, device=device), 1.0)
        logprobs_T.sum().backward()
        grads.append((logprobs_T.detach(), model.model.layers[0].self_attn.k_proj.weight.grad))
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(grads[0][0], grads[1][0], atol=0.1, rtol=0)
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=0.1, rtol=0.1)
