"""Rules about tracker packages. They look at installed versions, and import nothing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from hybridrl.config.checks.data import listed_twice
from hybridrl.config.checks.parts import check_part
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", ">=2.19"),
    "wandb": ("wandb", ">=0.26.1,<0.32"),
    "mlflow": ("mlflow-skinny", ">=3.12,<4"),
}
"""By tracker: the package and the tested versions, as in setup.py. mlflow depends on mlflow-skinny
of its own version."""


def check_trackers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The package of each tracker is installed, in a tested version."""
    trackers = config.tracking.trackers
    flaws = {name: flaw for name in trackers if (flaw := _flaw_of(name))}
    if flaws:
        usable = ",".join(name for name in trackers if name not in flaws)
        yield ConfigError(
            "tracking.trackers",
            list(trackers),
            "; ".join(flaws.values()),
            fix=f"pip install 'hybridrl[{','.join(flaws)}]', or set tracking.trackers=[{usable}]",
            remedies=[(f"tracking.trackers=[{usable}]",)],
        )


def _flaw_of(tracker: str) -> str:
    package, versions = TRACKER_PACKAGES[tracker]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = ""
    if not installed or find_spec(tracker) is None:
        return f"not installed: {tracker}"
    # A user chooses a pre-release on purpose.
    if SpecifierSet(versions).contains(installed, prereleases=True):
        return ""
    return f"{package} {installed} is installed, and {versions} was tested"


def check_trackers_stand_once(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each tracker is opened once: two would write each value twice."""
    trackers = config.tracking.trackers
    once = tuple(dict.fromkeys(trackers))
    if len(once) < len(trackers):
        yield listed_twice("tracking.trackers", trackers, once)


def check_function(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The function of metrics can be called."""
    for kind, spelled, given in config.tracking.parts:
        yield from check_part(kind, spelled, given)


RULES = (check_trackers, check_trackers_stand_once, check_function)
