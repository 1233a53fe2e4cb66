"""What ``mode=check`` says of trackers that are not installed, or in another version."""

import sys
from pathlib import Path

import pytest

from hybridrl.config.checks.cluster import TRACKER_PACKAGES
from hybridrl.errors import ConfigErrors
from tests.config.values import config_of

SETUP = Path(__file__).parents[2] / "setup.py"
BOTH = "tracking.trackers=[tensorboard,wandb]"


def refusal_of(override: str) -> str:
    with pytest.raises(ConfigErrors) as refused:
        config_of(override)
    (violation,) = refused.value.violations
    assert violation.remedies == (("tracking.trackers=[tensorboard]",),)
    return str(violation)


def install(package: str, version: str, *, into: Path, patch: pytest.MonkeyPatch) -> None:
    """Put what pip writes about a package in front of what is installed."""
    folder = into / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)
    patch.syspath_prepend(into)


def test_trackers_that_are_installed_are_accepted() -> None:
    trackers = config_of("tracking.trackers=[tensorboard,wandb,mlflow]").tracking.trackers
    assert trackers == ("tensorboard", "wandb", "mlflow")


def test_a_tracker_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = refusal_of(BOTH)
    assert "not installed: wandb. Fix: pip install 'hybridrl[wandb]', or set" in text


@pytest.mark.parametrize(
    ("tracker", "version"), [("wandb", "0.12.21"), ("wandb", "0.40.0"), ("mlflow", "1.27.0")]
)
def test_a_tracker_in_an_untested_version_is_refused(
    tracker: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, versions = TRACKER_PACKAGES[tracker]
    install(package, version, into=tmp_path, patch=monkeypatch)
    text = refusal_of(f"tracking.trackers=[tensorboard,{tracker}]")
    assert f"{package} {version} is installed, and {versions} was tested" in text
    assert f"pip install 'hybridrl[{tracker}]'" in text


def test_the_tested_versions_are_those_of_the_setup_file() -> None:
    text = SETUP.read_text(encoding="utf-8")
    for package, versions in TRACKER_PACKAGES.values():
        assert f'"{package}{versions}"' in text
