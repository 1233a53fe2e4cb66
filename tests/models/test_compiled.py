from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hybridrl.models.load import build_empty_model
from hybridrl.models.packed_model import PolicyModel, use_liger_kernels
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.microbatcher import lay_out
from hybridrl.workers.train.shards import build_model, compile_blocks
from tests.config.values import config_of
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL, make_batcher, make_rows


def _build(folder: Path, *, kernels: Literal["eager", "compiled"] = "eager") -> PolicyModel:
    config = replace(ACTOR, fsdp2=replace(ACTOR.fsdp2, kernels=kernels))
    model = build_model(
        folder, config=config, model_config=MODEL, ranks=Ranks(CPU), is_trainable=True
    )
    assert isinstance(model, PolicyModel)
    return model


def _learn(policy: PolicyModel, num_rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    batch = make_rows(num_rows, seed=num_rows, num_siblings=2)
    batcher = make_batcher()
    rows = batcher.read(batch.token_ids_BL, batch.response_mask_BL)
    policy.zero_grad()
    logprobs_S, _ = policy(lay_out(rows, range(num_rows), batcher).tokens, 1.0)
    logprobs_S.sum().backward()
    return logprobs_S.detach(), {n: p.grad for n, p in policy.named_parameters()}  # type: ignore[misc]


# Dynamo asks for it, and hides what torch then says from those to whom a warning is no error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("family", "most_graphs"), [("qwen3", 4), ("qwen3_5_text", 6)])
def test_compiled_blocks_use_one_graph_for_all_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, most_graphs: int, backend: str
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # megatron's stand-ins set it
    folder = make_tiny_model(tmp_path, family)
    plain, compiled = _build(folder), _build(folder)
    names = [name for name, _ in plain.named_parameters()]
    compile_blocks(compiled.hf, backend=backend)  # no C++ compiler: half a minute
    assert [name for name, _ in compiled.named_parameters()] == names
    counters.clear()
    for num_rows in (4, 6, 12):  # other lengths, and other numbers of buckets
        one, other = _learn(plain, num_rows), _learn(compiled, num_rows)
        torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=0)
        for name in names:
            torch.testing.assert_close(one[1][name], other[1][name], atol=1e-4, rtol=1e-4, msg=name)
    # What precedes attention or a state in a block and what follows it; twice, where a number
    # became a size.
    assert 2 <= counters["stats"]["unique_graphs"] <= most_graphs


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's inductor
@pytest.mark.parametrize("compiles", [True, False])
def test_blocks_are_compiled_where_the_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model = _build(make_tiny_model(tmp_path), kernels="compiled" if compiles else "eager")
    blocks = model.hf.model.layers
    assert {"_torchdynamo_orig_callable" in vars(block.forward) for block in blocks} == {compiles}


_LIGER = """
CALLS = []


def _apply(**settings):
    CALLS.append(settings)


MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": _apply}
"""


def test_liger_gets_the_model_and_leaves_the_loss_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A package that records what it is asked for, under the names of liger-kernel 0.8.
    package = tmp_path / "site" / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "monkey_patch.py").write_text(_LIGER)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    assert config_of("cluster=one_gpu", "actor.fsdp2.kernels=liger").actor.fsdp2.kernels == "liger"
    hf = build_empty_model(make_tiny_model(tmp_path / "model"), dtype=torch.float32)
    use_liger_kernels(hf)
    (settings,) = sys.modules["liger_kernel.transformers.monkey_patch"].CALLS
    assert settings.pop("model") is hf
    assert settings == {
        **{"rope": True, "rms_norm": True, "swiglu": True},
        **{"cross_entropy": False, "fused_linear_cross_entropy": False},
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
