"""The user's function that each worker process calls first."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from hybridrl.errors import ConfigError

KEY = "cluster.worker_setup_hook"
REMOVE = (f"{KEY}=null",)


@dataclass(frozen=True, slots=True)
class SetupHook:
    """Finds the function where it is called, so that only its name travels to the workers."""

    path: str
    """``package.module.function``."""

    def __call__(self) -> None:
        """Import the module and call the function.

        Raises:
            ConfigError: it cannot be imported, is no function, or raised.
        """
        module_name, _, name = self.path.rpartition(".")
        try:
            function = vars(import_module(module_name)).get(name)
        except Exception as err:
            raise self._error(f"{module_name} cannot be imported here: {_say(err)}") from err
        if not callable(function):
            what = (
                f"no {name}" if function is None else f"{name}={function!r}, which is no function"
            )
            raise self._error(f"{module_name} has {what}")
        try:
            function()
        except Exception as err:
            raise self._error(f"it raised {_say(err)}") from err

    def _error(self, rule: str) -> ConfigError:
        return ConfigError(
            KEY, self.path, rule, fix=f"mend it, or set {REMOVE[0]}", remedies=[REMOVE]
        )


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
