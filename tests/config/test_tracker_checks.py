"""What ``mode=check`` says of trackers that are not installed."""

import sys

import pytest

from hybridrl.errors import ConfigErrors
from tests.config.values import config_of

BOTH = "tracking.trackers=[tensorboard,wandb]"


def refusal_of(override: str) -> str:
    with pytest.raises(ConfigErrors) as refused:
        config_of(override)
    (violation,) = refused.value.violations
    assert violation.remedies == (("tracking.trackers=[tensorboard]",),)
    return str(violation)


def test_trackers_that_are_installed_are_accepted() -> None:
    trackers = config_of("tracking.trackers=[tensorboard,wandb,mlflow]").tracking.trackers
    assert trackers == ("tensorboard", "wandb", "mlflow")


def test_a_tracker_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = refusal_of(BOTH)
    assert "not installed: wandb. Fix: pip install 'hybridrl[wandb]', or set" in text
