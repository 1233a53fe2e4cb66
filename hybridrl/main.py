"""``python -m hybridrl.main``: compose, load, check, run. The only module that imports Hydra.

Neither torch nor Ray is imported before the configuration has passed its checks, so that
``--cfg job``, ``mode=check`` and a mistyped key answer at once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast


def _end_quietly(number: int, _: FrameType | None) -> NoReturn:
    """End at once: an exception could be raised during an import, which may swallow it."""
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(128 + number)


# The imports take a second. Until they are done nothing has started that needs an orderly end.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_quietly)

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridrl import env
from hybridrl.config.foreign.names import answer_choice
from hybridrl.config.foreign.spelling import TOO_DEEP, flaw_of_yaml
from hybridrl.config.load import (
    check_lengths,
    free_keys,
    keys_of_other_modes,
    known_keys,
    leaves,
    load_config,
    unknown_key,
    unresolved,
)
from hybridrl.config.reference import help_text
from hybridrl.errors import (
    ConfigError,
    ConfigErrors,
    HybridRLError,
    close_names,
    error_notes,
    shorten,
    suggest_name,
)
from hybridrl.run.modes.check import check, load_or_refuse, plan
from hybridrl.run.modes.sweep import SweepJob, build_jobs, run_sweep
from hybridrl.trainer.interrupt import RunInterrupted, exit_status

_CONFIG_DIR = str(env.CONFIG_ROOT / "hydra_configs")
_BY_NAME_TO_KEEP_RAY_OUT = "hybridrl.run.launch"
_DOCTOR = "hybridrl.run.modes.doctor"  # it imports torch
_STARTS_NOTHING = ("check", "plan", "doctor")
_SEARCH_PATH = "hydra.searchpath="
_EXIT_CONFIG = 2
_KEY = re.compile(r"[A-Za-z]\w*(\.\w+)*", re.ASCII)
"""A key that is set: not one that is added or deleted, and no ``group@package``."""

_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the driver of a submitted job

_HELP_FLAGS = {"--help", "-h"}
_REFUSALS = (HydraException, OmegaConfBaseException, YAMLError)


# Default compute types by device: CUDA's varlen attention needs 16 bits.
OmegaConf.register_new_resolver(
    "dtype_on", lambda device: "bfloat16" if device == "cuda" else "float32"
)


class BoundedSource(FileConfigSource):
    """Reads YAML files of a folder; refuses one that would fill memory or end in a traceback."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file; ``ConfigError`` if it is too large, not UTF-8, or not valid YAML."""
        file = Path(self.path, self._normalize_file_name(config_path))
        flaw = flaw_of_yaml(file.read_bytes()) if file.is_file() else ""
        if flaw:
            raise ConfigError("file", str(file), flaw, "correct the file")
        try:
            return super().load_config(config_path)
        except YAMLError:
            raise
        except RecursionError as err:  # libyaml 0.2.6 fails at 1000: a syntax error, so no flaw
            raise ConfigError("file", str(file), TOO_DEEP, "correct the file") from err
        except (ValueError, TypeError, AttributeError) as err:
            raise ConfigError("file", str(file), _one_line(err), "correct the file") from err


class RecipesSource(BoundedSource):
    """Shows Hydra only the group ``recipes`` of the folder above it.

    A plain ``file://`` source would offer every folder of a checkout, .venv included, as a group.
    """

    @staticmethod
    def scheme() -> str:
        """Return the text before ``://`` in the search path."""
        return "hybridrl"

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of groups and recipes under ``config_path``."""
        if config_path == "recipes":  # recipes/cluster holds files for clusters, not recipes
            return [n for n in super().list(config_path, results_filter) if n != "cluster"]
        return ["recipes"] if config_path == "" else []


class RecipesSearchPath(SearchPathPlugin):
    """Makes the folders recipes/ the config group ``recipes``: the current one, then our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders that hold recipes/. Hydra calls this once a command."""
        for folder in _recipe_roots():
            path = f"{RecipesSource.scheme()}://{folder}"
            search_path.append(provider="hybridrl-recipes", path=path)


def _recipe_roots() -> list[Path]:
    return list(dict.fromkeys([Path.cwd(), env.CONFIG_ROOT]))


def main() -> None:
    """Run the command line.

    Exit status: 0 done, 2 configuration refused or too large for memory, 1 the run failed or
    mode=doctor has bad rows; 128 + the number of the signal that stopped it before its last step
    (Ctrl-C 130, SIGTERM 143, SIGHUP 129).
    """
    sys.argv[1:] = with_free_keys_added(sys.argv[1:])
    if any(argument.partition("=")[0] in _HELP_FLAGS for argument in sys.argv[1:]):
        _print_help(sys.argv[1:])
        return
    env.set_value("HYDRA_FULL_ERROR", "1")  # Hydra then raises, and we word the message
    _register_sources()
    sweep = _Sweep()
    try:
        _refuse_flags(sys.argv[1:])
        decorate = hydra.main(version_base="1.3", config_path=_CONFIG_DIR, config_name="config")
        cast("Callable[[], None]", decorate(sweep.take))()
        if sweep.overrides_of_jobs:
            sys.exit(sweep.run())
    except ConfigErrors as errors:
        _stop(errors, _EXIT_CONFIG)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("\n".join(["interrupted", *error_notes(interrupt)]) + "\n")
        number = interrupt.number if isinstance(interrupt, RunInterrupted) else signal.SIGINT
        sys.exit(exit_status(number))
    except Exception as refusal:  # Hydra raises anything, from its own errors to AssertionError
        if sweep.has_begun:
            raise
        _stop(ConfigErrors(_explain_all(refusal, sys.argv[1:])), _EXIT_CONFIG)


def _print_help(arguments: Sequence[str]) -> None:
    """Print the overview, or the help for the sections and keys among ``arguments``."""
    asked = (argument.removeprefix("--help=") for argument in arguments)
    names = [argument for argument in asked if not argument.startswith("-")]
    try:
        keys = [name.partition("=")[0] for name in names]
        sys.stdout.write(help_text(keys, Path(_CONFIG_DIR), _names_in("recipes")))
    except ConfigError as error:
        _stop(error, _EXIT_CONFIG)


def _refuse_flags(arguments: Sequence[str]) -> None:
    """Answer flags that Hydra does not have: those of other frameworks with the keys here."""
    _, unknown = get_args_parser().parse_known_args(list(arguments))
    violations = []
    for flag in [argument for argument in unknown if argument.startswith("--")]:
        key, _, value = flag.partition("=")
        following = "".join(arguments[arguments.index(flag) + 1 :][:1])
        if "=" not in flag + following and not following.startswith("--"):
            value = following
        violations.append(unknown_key(key, value))
    if violations:
        raise ConfigErrors(violations)


def _register_sources() -> None:
    for plugin in (RecipesSource, RecipesSearchPath):
        Plugins.instance().register(plugin)
    SourcesRegistry.instance().types[BoundedSource.scheme()] = BoundedSource


class _Sweep:
    """Takes Hydra's compositions. A single run starts at once. Runs of ``--multirun`` are all
    checked first and start afterwards, so that a mistake in the last one costs no time.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.overrides_of_jobs: list[list[str]] = []
        self._refused: list[ConfigError] = []
        self._folder = Path()
        self._flags: list[str] = []

    def take(self, composed: DictConfig) -> None:
        """Run a composed configuration, or keep it for `run`."""
        self.has_begun = True
        settings = HydraConfig.get()
        if settings.mode != RunMode.MULTIRUN or composed.mode in _STARTS_NOTHING:
            # Not left to Hydra, which would put a line of its own before the message.
            try:
                _run_composed(composed, command=_command_typed(settings))
            except (ConfigError, ConfigErrors) as error:
                _stop(error, _EXIT_CONFIG)
            except HybridRLError as error:
                _stop(error, 1)
            return
        overrides = list(settings.overrides.task)
        refused = {str(error): error for error in _refusals_of_job(composed, overrides)}
        known = {str(error) for error in self._refused}
        self._refused += [error for text, error in refused.items() if text not in known]
        self.overrides_of_jobs.append(overrides)
        self._folder = Path(settings.sweep.dir)
        self._flags = _flags_to_hand_on(settings)

    def run(self) -> int:
        if self._refused:
            raise ConfigErrors(self._refused)
        jobs = build_jobs(self.overrides_of_jobs, folder=self._folder)
        return run_sweep(jobs, folder=self._folder, command=self._command)

    def _command(self, job: SweepJob) -> list[str]:
        quoted = str(job.folder).replace("'", r"\'")
        run_dir = f"trainer.run_dir='{quoted}'"
        return [sys.executable, "-m", "hybridrl.main", *self._flags, *job.overrides, run_dir]


def _refusals_of_job(composed: DictConfig, overrides: Sequence[str]) -> list[ConfigError]:
    if any(override.lstrip("+").startswith("trainer.run_dir=") for override in overrides):
        rule = "runs of a sweep would write into one folder; each gets its own below the sweep's"
        fix = "leave it out, or set hydra.sweep.dir=FOLDER"
        return [ConfigError("trainer.run_dir", composed.trainer.run_dir, rule, fix)]
    try:
        load_config(resolved(composed))
    except ConfigErrors as errors:
        return list(errors.violations)
    return list(keys_of_other_modes(composed.mode, overrides))


def _flags_to_hand_on(settings: HydraConf) -> list[str]:
    """Return the flags with which a run of the sweep composes the same configuration."""
    sources = settings.runtime.config_sources
    folders = [source.path for source in sources if source.provider == "command-line"]
    flags = [f"--config-name={settings.job.config_name}"]
    flags += [f"--config-dir={folder}" for folder in folders]
    return flags + [o for o in settings.overrides.hydra if o.lstrip("+").startswith(_SEARCH_PATH)]


def _command_typed(settings: HydraConf) -> list[str]:
    flags = [flag for flag in _flags_to_hand_on(settings) if flag != "--config-name=config"]
    # As typed: ${} is not resolved.
    typed = cast("list[str]", OmegaConf.to_container(settings.overrides.task))
    program = ["-m", "hybridrl.main", *flags, *typed]
    if env.get(_JOB_VARIABLE):
        return ["ray", "job", "submit", "--working-dir", ".", "--", "python", *program]
    own, on_path = Path(sys.executable), shutil.which("python")
    if on_path is not None and Path(on_path).parent == own.parent:
        return ["python", *program]
    return [os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own), *program]


def _run_composed(composed: DictConfig, *, command: Sequence[str]) -> None:
    config = load_or_refuse(resolved(composed))
    if unread := list(keys_of_other_modes(config.mode, command)):
        raise ConfigErrors(unread)
    starts_nothing = config.mode in _STARTS_NOTHING
    launch = None if starts_nothing else import_module(_BY_NAME_TO_KEEP_RAY_OUT)
    if signal.getsignal(signal.SIGINT) is _end_quietly:  # the run ends in order from now on
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.mode == "check":
        check(config)
    elif config.mode == "doctor":
        page, is_bad = import_module(_DOCTOR).examine(config)
        sys.stdout.write(page)
        sys.exit(int(is_bad))
    elif launch is None:
        plan(config)
    else:
        launch.run_supervised(config, resolved_yaml=OmegaConf.to_yaml(composed), command=command)


def compose(overrides: Sequence[str]) -> Mapping[str, object]:
    """Compose the configuration of a command with these overrides, without running it."""
    return resolved(compose_unresolved(overrides))


def compose_unresolved(overrides: Sequence[str]) -> DictConfig:
    """Compose as `compose`, with each ``${...}`` as it stands in the files."""
    _register_sources()
    with hydra.initialize_config_dir(_CONFIG_DIR, version_base="1.3"):
        return hydra.compose("config", with_free_keys_added(overrides))


def with_free_keys_added(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as Hydra needs them: ``++`` before keys that a file need not list."""
    free = tuple(f"{key}{end}" for key in free_keys() for end in (".", "={"))
    return [f"++{override}" if override.startswith(free) else override for override in overrides]


def resolved(composed: DictConfig) -> Mapping[str, object]:
    """Return the values of a composed configuration; ``ConfigErrors`` name what has none."""
    check_lengths(cast("Mapping[str, object]", OmegaConf.to_container(composed)))
    try:
        OmegaConf.resolve(composed)  # so that the run folder's time is read once
    except (OmegaConfBaseException, RecursionError) as err:
        raise ConfigErrors(_unresolved(composed) or [_explain(err, [])]) from err
    return cast("Mapping[str, object]", OmegaConf.to_container(composed))


def _unresolved(composed: DictConfig) -> list[ConfigError]:
    """Return every value whose ``${...}`` cannot be resolved."""
    violations = []
    for key, value in leaves(OmegaConf.to_container(composed)):
        try:
            OmegaConf.select(composed, key)
        except (OmegaConfBaseException, RecursionError) as err:
            violations.append(unresolved(key, value, _one_line(err)))
    return violations


def _explain_all(refusal: Exception, arguments: Sequence[str]) -> Sequence[ConfigError]:
    """Explain Hydra's error, and collect further errors: Hydra itself stops at the first."""
    if any(argument.startswith("-") for argument in arguments):
        return [_explain(refusal, arguments)]  # flags change the configuration: do not replay
    violations: list[ConfigError] = []
    kept: list[str] = []
    known, free = {*known_keys(), "recipes"}, ("hydra.", *(f"{key}." for key in free_keys()))
    for override in arguments:
        key, equals, value = override.partition("=")
        is_plain = bool(equals and _KEY.fullmatch(key))
        if is_plain and key not in known and not key.startswith(free):
            violations.append(unknown_key(key, value))  # without a composition of 0.15 s
            continue
        try:
            compose([*kept, override])
            kept.append(override)
        except ConfigErrors as errors:
            violations += errors.violations
        except Exception as another:  # as in main
            violations.append(_explain(another, [override]))
    if not violations:  # no override is wrong, so a file is
        return [_explain(refusal, [])]
    try:
        load_or_refuse(compose(kept))
    except ConfigErrors as errors:
        violations += errors.violations
    return violations


def _explain(refusal: Exception, overrides: Sequence[str]) -> ConfigError:
    """Turn a refusal of Hydra, OmegaConf or YAML into one message with the nearest names."""
    if isinstance(refusal, ConfigError):
        return refusal
    text = _one_line(refusal)
    given = {key.lstrip("+~"): value for key, _, value in (o.partition("=") for o in overrides)}
    if isinstance(refusal, MissingConfigException) and refusal.missing_cfg_file:
        group, _, name = refusal.missing_cfg_file.rpartition("/")
        hint = suggest_name(name, refusal.options) if refusal.options else "correct the name"
        section, _, folder = group.partition("/")  # model=OWNER/NAME is a file in a folder to Hydra
        if section == "recipes":
            hint = _suggest_recipe(name)
        hint = answer_choice(group, name) or hint
        typed = f"{folder}/{name}" if folder else name
        return ConfigError(section or "config", typed, "there is no such file in this group", hint)
    if isinstance(refusal, OverrideParseException):
        key, _, value = refusal.override.partition("=")
        fix = "write key=value, and quote text with special characters: 'key=\"a, b\"'"
        return ConfigError(key, value, text, fix)
    mistyped = re.search(r"Could not (?:override|delete)[^']*'([^'@=]+)", text)
    if mistyped:
        return unknown_key(mistyped[1], given.get(mistyped[1], ""))
    key, value = next(iter(given.items()), ("config", ""))
    names = _names_in(key) if key else []
    if names and not isinstance(refusal, _REFUSALS):  # a number or a list instead of a name
        rule = "a section is chosen by the name of one of its files"
        return ConfigError(key, value, rule, f"set {key}=NAME; {suggest_name(value, names)}")
    return ConfigError(key, value, f"it cannot be read: {text}", "correct it, or see --help")


def _names_in(group: str) -> list[str]:
    """Return the choices of a group: of recipes with their folders."""
    if group != "recipes":
        return sorted(file.stem for file in Path(_CONFIG_DIR, group).glob("*.yaml"))
    folders = [root / group for root in _recipe_roots()]
    files = [(folder, file) for folder in folders for file in folder.rglob("*.yaml")]
    names = {file.relative_to(folder).with_suffix("").as_posix() for folder, file in files}
    return sorted(name for name in names if not name.startswith("cluster/"))


def _suggest_recipe(name: str) -> str:
    """Suggest recipes by what follows their folder; so named, or nearly."""
    known = {full.rpartition("/")[2]: full for full in _names_in("recipes")}
    stem = name.removesuffix("_cpu").removeprefix("cpu_")  # as they were called without folders
    if stem in known:
        return f"set recipes={known[stem]}"
    close = [known[each] for each in close_names(stem, list(known))]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "correct the name;"
    return f"{hint} --help lists all; yours are files recipes/NAME.yaml of the current folder"


def _one_line(error: Exception) -> str:
    if "integer string conversion" in str(error):  # Python's own advice is for programmers
        return "it holds a number of thousands of digits"
    return shorten(" ".join(str(error).split()), at_most=1000)


def _stop(error: HybridRLError, status: int) -> NoReturn:
    if isinstance(error, ConfigErrors) and len(error.violations) == 1:
        error = error.violations[0]
    sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *error_notes(error)]) + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
