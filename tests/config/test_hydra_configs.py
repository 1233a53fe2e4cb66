import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

import hybridrl
from hybridrl.config.checks.violations import rules_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import free_keys, known_keys, load_config
from hybridrl.errors import ConfigErrors
from hybridrl.main import compose
from tests.config.values import config_of

ROOT = Path(hybridrl.__file__).parents[1]
SECTIONS = {
    name: hint
    for name, hint in get_type_hints(ExperimentConfig).items()
    if dataclasses.is_dataclass(hint) and isinstance(hint, type)
}
NAMED_BY_USERS = {key.rpartition(".")[2] for key in free_keys()}
FILES = sorted(ROOT.glob("hydra_configs/*/*.yaml"))
RECIPES = sorted(
    path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
    for path in ROOT.rglob("recipes/**/*.yaml")
    if path.parent.name != "cluster"
)


def keys_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict) and name not in NAMED_BY_USERS:
            yield from keys_of(value, f"{prefix}{name}.")


def fields_of(section: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted fields, those of a nullable section only where the file gives it."""
    for name, hint in get_type_hints(section).items():
        yield prefix + name
        is_union = get_origin(hint) in (Union, UnionType)
        for part in get_args(hint) if is_union else (hint,):
            if dataclasses.is_dataclass(part) and isinstance(part, type) and values.get(name):
                yield from fields_of(part, values[name], f"{prefix}{name}.")


def test_there_is_one_folder_per_section() -> None:
    folders = {path.name for path in (ROOT / "hydra_configs").iterdir() if path.is_dir()}
    assert folders == set(SECTIONS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_keys_of_a_file_are_the_fields_of_its_section(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    keys = {key for key in keys_of(values) if key != "defaults"}
    fields = set(fields_of(SECTIONS[file.parent.name], values))
    if "defaults" in values:  # holds differences only
        assert keys <= fields
    else:
        assert keys == fields


def test_the_top_file_has_a_default_for_each_section_and_recipes_last() -> None:
    values = yaml.safe_load((ROOT / "hydra_configs/config.yaml").read_text())
    groups = [
        name
        for entry in values["defaults"]
        if isinstance(entry, dict)
        for name in entry
        if not name.startswith("override")
    ]
    assert groups == [*(name for name in SECTIONS), "recipes"]
    assert set(values) - {"defaults", "hydra"} == set(get_type_hints(ExperimentConfig)) - set(
        SECTIONS
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_known_and_misses_only_files_and_packages(recipe: str) -> None:
    text = (ROOT / f"recipes/{recipe}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    assert len(text.splitlines()) < 40
    if recipe != "none":
        assert f"recipes={recipe}" in text
    try:
        load_config(compose([f"recipes={recipe}"]))
    except ConfigErrors as errors:
        on_disk = {"model.path", "data.train_files", "data.eval_files", "reward.function"}
        on_disk |= {"algorithm.teacher_path", "reward.functions.score.args.path"}
        on_disk |= {"serving.models.judge.path", "serving.models.judge.key_variable"}
        on_disk |= {"serving.models.policy.key_variable"}
        packages = {"megatron.optimizer_args.use_precision_aware_optimizer"}  # TransformerEngine's
        packages |= {
            f"data.sources.{name}.files" for name in ("sums", "letters")
        }  # reasoning-gym's
        missing = {violation.key for violation in errors.violations}
        assert missing <= on_disk | packages, str(errors)


def test_a_recipe_may_choose_options_and_the_command_line_has_the_last_word() -> None:
    name = "recipes=gpu/grpo_gsm8k_qwen2_5_0_5b_1gpu"
    assert compose([name])["cluster"]["device"] == "cuda"  # type: ignore[index]
    assert compose([name, "cluster=cpu"])["cluster"]["device"] == "cpu"  # type: ignore[index]
    assert compose([name, "trainer.num_steps=7"])["trainer"]["num_steps"] == 7  # type: ignore[index]


def test_on_gpus_models_compute_in_bfloat16_unless_told_otherwise() -> None:
    def computes_in(*overrides: str) -> list[str]:
        values: Any = compose(overrides)
        return [values["actor"]["compute_dtype"], values["rollout"]["dtype"]]

    gpu = "cluster=one_gpu"
    assert computes_in() == computes_in("actor=megatron") == ["float32"] * 2
    assert computes_in(gpu) == computes_in(gpu, "actor=megatron") == ["bfloat16"] * 2
    assert computes_in(gpu, "rollout=sglang")[1] == "bfloat16"
    assert computes_in(gpu, "actor=megatron", "cluster.device=cpu") == ["float32"] * 2
    assert computes_in(gpu, "actor.compute_dtype=float32") == ["float32", "bfloat16"]


def test_the_default_experiment_is_the_one_that_the_readme_tells() -> None:
    config = config_of()
    assert (config.num_rows_per_step, config.max_row_tokens) == (128, 48)
    assert config.algorithm.num_updates_per_step == 1
    assert config.cluster.device == "cpu"
    assert len(rules_of("train")) > 5


def test_engines_have_room_for_the_responses_that_are_sampled() -> None:
    sets = "eval.sets={a: {max_response_tokens: 7}, b: {max_response_tokens: 9}}"
    longer, off = "eval.max_response_tokens=60", "eval.every_num_steps=0"
    assert config_of(longer).max_context_tokens == 24 + 60
    assert config_of(longer, sets).max_context_tokens == 24 + 24
    assert config_of(longer, off).max_context_tokens == 24 + 24
    assert config_of(sets, off, "mode=eval").max_context_tokens == 24 + 9  # nothing else is sampled
    assert config_of(longer, "eval.sets={a: {}}", "mode=eval").max_context_tokens == 24 + 60


@pytest.mark.parametrize("section", [*SECTIONS.values(), ExperimentConfig])
def test_every_field_has_a_line_of_meaning(section: type) -> None:
    tree = ast.parse(Path(inspect.getfile(section)).read_text())
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in pairwise([*owner.body, owner]):
            if isinstance(field, ast.AnnAssign) and owner.name != "EvalSet":  # nobody types it
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, f"{owner.name}: {ast.unparse(field)}"


def test_there_are_not_too_many_keys_to_read() -> None:
    assert len(list(known_keys())) <= 239
