"""The user's function that each worker process calls first."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from hybridrl.errors import ConfigError

_KEY = "cluster.worker_setup_hook"


def hook_error(path: str, rule: str, fix: str = "correct it") -> ConfigError:
    """Return the error of a hook that cannot be called."""
    reset = f"{_KEY}=null"
    return ConfigError(_KEY, path, rule, fix=f"{fix}, or set {reset}", remedies=[(reset,)])


@dataclass(frozen=True, slots=True)
class SetupHook:
    """Imports the function where it is called, so that only its name travels to the workers."""

    path: str
    """``package.module.function``."""

    def __call__(self) -> None:
        """Import the module and call the function.

        Raises:
            ConfigError: it cannot be imported, is not a function, or raised.
        """
        module_name, _, name = self.path.rpartition(".")
        try:
            function = vars(import_module(module_name)).get(name)
        except Exception as err:
            rule = f"{module_name} cannot be imported here: {_say(err)}"
            raise hook_error(self.path, rule) from err
        if not callable(function):
            what = (
                f"no {name}" if function is None else f"{name}={function!r}, which is no function"
            )
            raise hook_error(self.path, f"{module_name} has {what}")
        try:
            function()
        except Exception as err:
            raise hook_error(self.path, f"it raised {_say(err)}") from err


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
