"""The site builds with every link and anchor, and its reference has every key and metric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config.load import known_keys
from hybridrl.metrics import DECLARATIONS
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. ``--strict`` fails on a missing page, link or anchor."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_every_configuration_key(site: Path) -> None:
    page = (site / "reference/configuration/index.html").read_text()
    sections = {key for key in known_keys() if "." not in key} - {"mode", "seed"}
    assert [k for k in known_keys() if k not in sections and f'id="{k}"' not in page] == []
    assert [s for s in sections if f'id="{s}"' not in page] == []


def test_site_has_every_metric(site: Path) -> None:
    page = (site / "metrics/index.html").read_text()
    assert [name for name in DECLARATIONS if f"<code>{name}</code>" not in page] == []


def test_site_has_every_recipe_and_the_api(site: Path) -> None:
    recipes = (site / "reference/recipes/index.html").read_text()
    names = {file.stem for file in ROOT.glob("recipes/*/*.yaml") if file.parent.name != "cluster"}
    assert [name for name in names if f'{name}"' not in recipes] == []
    api = (site / "reference/api/index.html").read_text()
    assert 'id="hybridrl.algorithms.advantages.grpo.grpo"' in api
    assert 'id="hybridrl.workers.train.protocol.OffloadableModel"' in api


def test_site_fetches_nothing_from_outside(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page
