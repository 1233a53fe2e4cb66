"""Prompts of a rehearsal: no two alike, and full of the largest images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hybridrl.images import Image
from hybridrl.models.architecture import read_architecture
from hybridrl.models.image_settings import read_image_settings
from hybridrl.rehearsal.model_folder import with_hollow_models
from hybridrl.rehearsal.prompts import longest_prompts
from tests.config.values import config_of
from tests.planning.models import PREPROCESSOR, QWEN2_5_VL_3B, QWEN3_8B

OF_FOLDER = ("model.starter=null", "data=files", "data.train_files=[rows.jsonl]", "mode=plan")


def images_of(folder: Path, *overrides: str) -> list[tuple[Image, ...]]:
    (folder / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    config = config_of(*OF_FOLDER, f"model.path={folder}", *overrides)
    prompts = longest_prompts(config, 3)
    for tokens, images in zip(prompts.token_ids_PL.unbind(), prompts.images_P, strict=True):
        assert int((tokens == 151655).sum()) == sum(image.num_tokens for image in images)
    return list(prompts.images_P)


def test_no_two_prompts_are_computed_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    config = config_of(*OF_FOLDER, f"model.path={tmp_path}", "data.max_prompt_tokens=50")
    rows = longest_prompts(config, 40).token_ids_PL.unbind()
    assert {len(row) for row in rows} == {50}
    assert len({tuple(row.tolist()) for row in rows}) == 40


def test_prompts_are_full_of_images_that_no_other_has(tmp_path: Path) -> None:
    rows = images_of(tmp_path, "data.max_prompt_tokens=100")
    assert [[(image.rows, image.columns) for image in row] for row in rows] == [[(10, 10)]] * 3
    assert len({image.identity for row in rows for image in row}) == 3
    assert rows[0][0].fetch().shape == (280, 280, 3)


def test_images_are_no_larger_than_the_processor_allows(tmp_path: Path) -> None:
    processor = PREPROCESSOR | {"max_pixels": 5 * 5 * 28 * 28}
    images_of(tmp_path, "data.max_prompt_tokens=100")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    config = config_of(*OF_FOLDER, f"model.path={tmp_path}", "data.max_prompt_tokens=100")
    rows = list(longest_prompts(config, 1).images_P)
    assert [(image.rows, image.columns) for image in rows[0]] == [(5, 5)] * 4
    assert images_of(tmp_path, "data.max_prompt_tokens=3") == [()] * 3  # too short for the smallest


def test_the_folder_of_a_rehearsal_has_the_tower_and_the_limit_of_the_run(tmp_path: Path) -> None:
    images_of(tmp_path, "data.max_prompt_tokens=100")
    (tmp_path / "hollow").mkdir()
    given = (f"model.path={tmp_path}", "data.max_image_pixels=7840", "data.max_prompt_tokens=100")
    hollow = with_hollow_models(config_of(*OF_FOLDER, *given), tmp_path / "hollow", num_layers=2)
    folder = Path(str(hollow.model.path))
    settings = read_image_settings(folder)
    assert settings == read_image_settings(tmp_path, max_pixels=7840)
    assert read_architecture(folder) == replace(read_architecture(tmp_path), num_layers=2)
