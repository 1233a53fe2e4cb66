"""``python -m hybridrl.main``: compose, load, check, run. The only module that imports Hydra.

Neither torch nor Ray is imported before the configuration has passed its checks, so that
``--cfg job``, ``mode=check`` and a mistyped key answer at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, cast

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridrl import env
from hybridrl.config.load import known_keys, load_config
from hybridrl.config.summary import summarize
from hybridrl.errors import ConfigError, ConfigErrors, HybridRLError, nearest

_PACKAGE = Path(__file__).resolve().parent
# In a wheel both folders lie inside the package, in a checkout beside it.
_ROOT = _PACKAGE if (_PACKAGE / "hydra_configs").is_dir() else _PACKAGE.parent
_CONFIG_DIR = str(_ROOT / "hydra_configs")
_BY_NAME_TO_KEEP_RAY_OUT = "hybridrl.trainer.launch"
_EXIT_CONFIG = 2
_EXIT_INTERRUPTED = 130
_REFUSALS = (HydraException, OmegaConfBaseException, YAMLError)


class RecipesSource(FileConfigSource):
    """Shows Hydra the group ``recipes`` of the folder above it, and nothing else.

    A plain ``file://`` source would offer every folder of a checkout, .venv included, as a group.
    """

    @staticmethod
    def scheme() -> str:
        """Return what stands before ``://`` in the search path."""
        return "hybridrl"

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of groups and recipes under ``config_path``."""
        if config_path.startswith("recipes"):
            return super().list(config_path, results_filter)
        return ["recipes"] if config_path == "" else []


class RecipesSearchPath(SearchPathPlugin):
    """Makes the folder recipes/ the config group ``recipes``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder that holds recipes/. Hydra calls this once a command."""
        search_path.append(provider="hybridrl-recipes", path=f"{RecipesSource.scheme()}://{_ROOT}")


def main() -> None:
    """Run the command line.

    Exit status: 0 done, 2 configuration refused, 1 the run failed, 130 interrupted.
    """
    env.set_value("HYDRA_FULL_ERROR", "1")  # Hydra then raises, and we word the message
    _register_recipes()
    try:
        _run_under_hydra()
    except _REFUSALS as refusal:
        _stop(ConfigErrors(_explain_all(refusal, sys.argv[1:])), _EXIT_CONFIG)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("\n".join(["interrupted", *_notes(interrupt)]) + "\n")
        sys.exit(_EXIT_INTERRUPTED)


def _register_recipes() -> None:
    for plugin in (RecipesSource, RecipesSearchPath):
        Plugins.instance().register(plugin)


@hydra.main(version_base="1.3", config_path=_CONFIG_DIR, config_name="config")
def _run_under_hydra(composed: DictConfig) -> None:
    try:
        _run_composed(composed)
    except (ConfigError, ConfigErrors) as error:
        _stop(error, _EXIT_CONFIG)
    except HybridRLError as error:
        _stop(error, 1)


def _run_composed(composed: DictConfig) -> None:
    config = load_config(_as_mapping(composed))
    if config.mode == "check":
        sys.stdout.write(summarize(config) + "\n")
        return
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)  # before torch and Ray are imported, on the next line
    launch = import_module(_BY_NAME_TO_KEEP_RAY_OUT)
    launch.run(config, resolved_yaml=OmegaConf.to_yaml(composed))


def compose(overrides: Sequence[str]) -> Mapping[str, object]:
    """Compose what the command with these overrides would run with, without running it.

    Raises:
        HydraException: Hydra refuses an override, a recipe or a group.
        ConfigError: an interpolation cannot be resolved.
        YAMLError: a file is not YAML.
    """
    _register_recipes()
    with hydra.initialize_config_dir(_CONFIG_DIR, version_base="1.3"):
        return _as_mapping(hydra.compose("config", list(overrides)))


def _as_mapping(composed: DictConfig) -> Mapping[str, object]:
    try:
        OmegaConf.resolve(composed)  # in place, so that the run folder's time is told once
    except OmegaConfBaseException as err:
        rule = " ".join(str(err.msg or err).split())
        raise ConfigError(err.full_key or "config", "${...}", rule, "name an existing key") from err
    return cast("Mapping[str, object]", OmegaConf.to_container(composed))


def _explain_all(refusal: Exception, arguments: Sequence[str]) -> Sequence[ConfigError]:
    """Word Hydra's refusal, and find what else is wrong: Hydra itself stops at the first."""
    if any(argument.startswith("-") for argument in arguments):
        return [_explain(refusal, arguments)]  # flags change what is composed: do not replay
    violations: list[ConfigError] = []
    kept: list[str] = []
    for override in arguments:
        try:
            compose([*kept, override])
            kept.append(override)
        except ConfigError as error:
            violations.append(error)
        except _REFUSALS as another:
            violations.append(_explain(another, [override]))
    if not violations:  # no override is at fault: a file is
        return [_explain(refusal, [])]
    try:
        load_config(compose(kept))
    except ConfigErrors as errors:
        violations += errors.violations
    return violations


def _explain(refusal: Exception, overrides: Sequence[str]) -> ConfigError:
    """Turn a refusal of Hydra, OmegaConf or YAML into one message with the nearest names."""
    text = " ".join(str(refusal).split())
    given = {key.lstrip("+~"): value for key, _, value in (o.partition("=") for o in overrides)}
    if isinstance(refusal, MissingConfigException) and refusal.missing_cfg_file:
        group, _, name = refusal.missing_cfg_file.rpartition("/")
        hint = nearest(name, refusal.options) if refusal.options else "correct the name"
        return ConfigError(group or "config", name, "there is no such file in this group", hint)
    if isinstance(refusal, OverrideParseException):
        key, _, value = refusal.override.partition("=")
        fix = "write key=value, and quote text with special characters: 'key=\"a, b\"'"
        return ConfigError(key, value, text, fix)
    mistyped = re.search(r"Could not (?:override|delete)[^']*'([^'@=]+)", text)
    if mistyped:
        return _unknown_key(mistyped[1], given.get(mistyped[1], ""))
    key, value = next(iter(given.items()), ("config", ""))
    return ConfigError(key, value, text, "correct it, or see --help")


def _unknown_key(key: str, value: str) -> ConfigError:
    section, dot, name = key.rpartition(".")
    siblings = [known.rpartition(".") for known in (*known_keys(), "recipes")]
    names = [sibling for above, _, sibling in siblings if above == section]
    if not names:  # the section itself is mistyped, or the key stands in another one
        return ConfigError(key, value, "there is no such section", nearest(key, [*known_keys()]))
    hint = nearest(name, names)
    return ConfigError(key, value, f"there is no such key{dot and ' in ' + section}", hint)


def _stop(error: HybridRLError, status: int) -> NoReturn:
    if isinstance(error, ConfigErrors) and len(error.violations) == 1:
        error = error.violations[0]
    sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *_notes(error)]) + "\n")
    raise SystemExit(status)


def _notes(error: BaseException) -> list[str]:
    notes: list[str] = vars(error).get("__notes__", [])
    return notes


if __name__ == "__main__":
    main()
