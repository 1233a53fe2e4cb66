"""TransformerEngine: when its layers are chosen, and that they are put together rightly.

Its kernels need CUDA. Here a stand-in with its names and parameters (``packages``) is on the path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.test_megatron_recipes import MODELS
from tests.config.values import config_of
from tests.megatron.engines import run_with_transformer_engine
from tests.megatron.stand_ins import install
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, assert_same_weights

StepsOf = Callable[[Family, str], dict[str, Any]]
CASES: tuple[tuple[Family, str], ...] = (
    *(("qwen3", "start"), ("qwen3", "recipes")),
    *(("qwen3", "fsdp2"), ("qwen2_moe", "local"), ("qwen3", "attention")),
    *(("qwen2_moe", "adapter"), ("qwen3", "small state"), ("qwen3", "half offloaded")),
)


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory: pytest.TempPathFactory) -> StepsOf:
    """What a family learnt with TransformerEngine's layers in a case: one program does all."""
    folder = tmp_path_factory.mktemp("fused")
    for family in {family for family, _ in CASES}:
        make_tiny_model(folder / family, family)
    words = [
        word
        for family, case in CASES
        for word in (str(folder / family), case, str(folder / f"{family} {case}.pt"))
    ]
    done = run_with_transformer_engine("tests.megatron.fused_steps", *words)

    def read(family: Family, case: str) -> dict[str, Any]:
        file = folder / f"{family} {case}.pt"
        assert file.is_file(), done.stderr[-4000:]
        steps: dict[str, Any] = torch.load(file)
        return steps

    return read


def assert_same_steps(found: dict[str, Any], *, atol: float = 1e-5) -> None:
    steps = zip(found["fused"]["steps"], found["plain"]["steps"], strict=True)
    for (logprobs, norm), (plain_logprobs, plain_norm) in steps:
        torch.testing.assert_close(logprobs, plain_logprobs, atol=atol, rtol=0)
        assert norm == pytest.approx(plain_norm, rel=atol)
    assert_same_weights(found["fused"]["weights"], found["plain"]["weights"], atol=atol)


@pytest.mark.parametrize(("family", "other"), [("qwen3", "fsdp2"), ("qwen2_moe", "local")])
def test_fused_layers_learn_what_others_learn(
    steps_of: StepsOf, family: Family, other: str
) -> None:
    found = steps_of(family, other)
    assert_same_steps(found)
    names = found["names"]
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    grouped = "decoder.layers.0.mlp.experts.linear_fc2.weight3"
    assert (grouped in names) is (family == "qwen2_moe")
    assert found["fields"] == {
        "gradient_accumulation_fusion": True,
        "apply_rope_fusion": True,
        "moe_permute_fusion": family == "qwen2_moe",
    }
    assert not found["attended"]


def test_attention_may_be_transformer_engines(steps_of: StepsOf) -> None:
    found = steps_of("qwen3", "attention")
    assert_same_steps(found)
    assert found["attended"] > 0


def test_adapters_learn_beside_fused_layers(steps_of: StepsOf) -> None:
    found = steps_of("qwen2_moe", "adapter")
    assert_same_steps(found)
    assert found["fields"]["gradient_accumulation_fusion"] is False
    assert any(name.endswith("linear_qkv.layer_norm_weight") for name in found["names"])
    assert_same_weights(found["fused"]["adapter"], found["plain"]["adapter"], atol=1e-5)


@pytest.mark.parametrize("case", ["small state", "half offloaded"])
def test_optimizer_state_placement_changes_no_step(steps_of: StepsOf, case: str) -> None:
    assert_same_steps(steps_of("qwen3", case), atol=2e-3)  # of weights of 16 bits


def test_recipes_use_all_fusions_of_transformer_engine(steps_of: StepsOf) -> None:
    for name, (lines, fields_of_models) in steps_of("qwen3", "recipes").items():
        assert len(lines) == 1, lines
        [fields] = fields_of_models
        assert fields["transformer_impl"] == "transformer_engine"
        has_experts = "num_experts" in MODELS[name]
        assert fields["moe_grouped_gemm"] is fields["moe_permute_fusion"] is has_experts
        assert fields["gradient_accumulation_fusion"]
        assert fields["apply_rope_fusion"]
        assert fields["bias_activation_fusion"]
        assert fields["attention"] == "auto"  # TransformerEngine's; "local" is ours


def test_a_start_without_cuda_names_the_key_to_set_and_keeps_megatrons_warnings(
    steps_of: StepsOf,
) -> None:
    found = steps_of("qwen3", "start")
    assert found["error"].startswith("megatron-core asks for CUDA")
    assert "cluster.worker_setup_hook=tests.megatron.stand_ins.install" in found["error"]
    assert any("Apex is not installed" in warning for warning in found["warnings"])


def test_auto_layers_need_cuda_and_transformer_engine() -> None:
    install()
    from hybridrl.workers.train.megatron.configuration import fuses_layers
    from hybridrl.workers.train.megatron.megatron_core import HAVE_TE

    megatron = config_of().megatron
    assert megatron.layers == "auto"
    assert not fuses_layers(megatron, torch.device("cpu"))
    assert fuses_layers(megatron, torch.device("cuda")) is HAVE_TE
    assert not fuses_layers(replace(megatron, layers="local"), torch.device("cuda"))


def test_microbatch_lengths_suit_eight_bit_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    from hybridrl.models.architecture import read_architecture
    from hybridrl.workers.train.megatron import configuration
    from hybridrl.workers.train.megatron.configuration import token_multiple, transformer_config
    from hybridrl.workers.train.megatron.context import MegatronContext

    monkeypatch.setattr(configuration, "HAVE_TE", True)
    architecture = read_architecture(make_tiny_model(tmp_path))

    def multiple(tensor: int, *, is_shared: bool, **args: str) -> int:
        megatron = replace(
            config_of().megatron,
            layers="transformer_engine",
            tensor_parallel_size=tensor,
            sequence_parallel=is_shared,
            transformer_args=args,
        )
        context = MegatronContext(
            megatron=megatron, model=config_of().model, device=CPU, seed=0, timeout_s=60.0
        )
        built = transformer_config(architecture, context, ACTOR, duty="scores")
        return token_multiple(built)

    assert multiple(1, is_shared=False) == 1
    assert multiple(2, is_shared=True) == 2
    assert multiple(2, is_shared=False, fp8="hybrid") == 32
    assert multiple(2, is_shared=True, fp8="hybrid") == 64
