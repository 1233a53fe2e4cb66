from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybridrl.main import compose
from hybridrl.report.run import Settings, read_defaults


def test_the_defaults_are_those_that_hydra_composes() -> None:
    composed = Settings(compose([])).changes(read_defaults())
    assert composed == {}
    keys = set(Settings(compose([])).flat) - set(read_defaults().flat)
    assert keys == set()


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("seed=3", {"seed": (0, 3)}),
        ("actor.optimizer.lr=2e-4", {"actor.optimizer.lr": ("3e-5", 2e-4)}),
        ("tracking.trackers=[]", {"tracking.trackers": (["tensorboard"], [])}),
        ("actor.optimizer.lr=0.00003", {}),
    ],
)
def test_what_differs_from_the_defaults_is_found(
    tmp_path: Path, override: str, change: dict[str, tuple[object, object]]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(compose([override])))
    assert Settings.read(path).changes(read_defaults()) == change


def test_a_file_that_is_no_yaml_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1,\n")
    assert Settings.read(tmp_path / "config.yaml").flat == {}
    assert Settings.read(tmp_path / "missing.yaml").flat == {}


def test_numbers_are_numbers_however_they_are_spelled() -> None:
    settings = Settings({"a": {"b": "1e-4", "c": 3, "d": "text", "e": True, "f": None}})
    assert [settings.number(f"a.{name}") for name in "bcdefg"] == [1e-4, 3.0, *[None] * 4]
