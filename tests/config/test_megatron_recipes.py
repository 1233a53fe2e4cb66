"""Runs on several machines with megatron-core: their sizes fit their models, and their headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hybridrl
from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config, read_config
from hybridrl.config.summary import summarize
from hybridrl.main import compose
from tests.config.test_checks import NO_TENSORS
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B

RECIPES = Path(hybridrl.__file__).parents[1] / "recipes" / "gpu"
MODELS = {
    "grpo_qwen3_8b_2x8_megatron": QWEN3_8B,
    "grpo_qwen3_30b_a3b_1x8_megatron": QWEN3_30B_A3B,
    "grpo_qwen3_30b_a3b_4x8_megatron": QWEN3_30B_A3B,
}


def config_of(name: str, folder: Path, *overrides: str) -> ExperimentConfig:
    """The recipe with a model's config.json, and what it says alone, in the place of its files."""
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").write_text(NO_TENSORS)
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    rows = [f"data.{split}_files=[{folder}/rows.jsonl]" for split in ("train", "eval")]
    given = (f"recipes=gpu/{name}", f"model.path={folder}", *rows, "mode=check", *overrides)
    config, refused = read_config(compose(given))
    assert config is not None
    assert not refused
    return config


def test_every_recipe_on_megatron_that_needs_gpus_is_looked_at() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*_megatron.yaml")) == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_all_checks_pass_but_for_packages_that_are_missing_here(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    for violation in find_violations(config):
        assert violation.key == "reward.function"
        assert "math-verify, which is not installed" in violation.rule
    assert find_violations(config_of(name, tmp_path, "reward=exact_match")) == []
    # Sizes are held against the model: with an odd number of heads this one could not be cut.
    fewer = {**MODELS[name], "num_attention_heads": 31}
    config_of(name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fewer))
    broken = {violation.key for violation in find_violations(config)}
    assert "megatron.tensor_parallel_size" in broken


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "grpo_qwen3_8b_2x8_megatron",
            ("tensor 2 x pipeline 1", "8 data-parallel", "64 of them a rank that has rows"),
        ),
        (
            "grpo_qwen3_30b_a3b_4x8_megatron",
            ("tensor 4 x pipeline 2", "4 data-parallel", "over 8 x 1 ranks"),
        ),
    ],
)
def test_a_check_says_how_the_model_is_cut(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    text = summarize(config_of(name, tmp_path))
    assert all(word in text for word in words), text


def test_the_run_on_a_cpu_names_a_hook_that_is_there() -> None:
    config = load_config(compose(["recipes=cpu/megatron"]))
    assert config.cluster.worker_setup_hook == "tests.megatron.stand_ins.install"
    assert (config.cluster.num_ranks, config.num_train_groups) == (2, 1)
