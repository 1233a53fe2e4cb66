"""The ``cluster`` section, and the user's function that each worker process calls first."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

from pydantic import Field

from hybridrl import env
from hybridrl.config.limits import Ranks, Seconds, Threads
from hybridrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Machines and processes. Mirrors hydra_configs/cluster/*.yaml key by key."""

    device: Literal["cpu", "cuda"]
    """Device that ranks compute on."""

    num_nodes: Ranks
    """Machines: each is a different node of the Ray cluster."""

    num_ranks_per_node: Ranks
    """Worker processes per machine; with cuda one GPU each."""

    device_memory_gib: Annotated[float, Field(gt=0.0, le=2**14, examples=[80.0])] | None
    """Memory of one rank in GiB, with which ``mode=plan`` and ``mode=check`` compare its peak. Null
    on a CPU is this machine's memory divided by its ranks; on CUDA it is then not compared. Type
    what is usable: 79 of a GPU with 80."""

    host_memory_gib: Annotated[float, Field(gt=0.0, le=2**16, examples=[1024.0])] | None
    """Host memory of one machine in GiB, with which ``mode=plan`` and ``mode=check`` compare that
    of its ranks on CUDA. Null does not compare."""

    num_threads_per_rank: Threads
    """OpenMP threads of a rank. 0 leaves torch's choice."""

    ray_address: str | None
    """An existing Ray cluster (``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``). Null takes
    ``$RAY_ADDRESS``, which `ray job submit` sets; without it Ray is started on this machine."""

    worker_setup_hook: str | None
    """A function without arguments, as ``package.module.function``, that each worker process calls
    first: before engines are built, after Ray has set the environment. Use it to register a
    tokenizer or a model class, load a kernel, or attach a debugger."""

    start_timeout_s: Seconds
    """Seconds to wait for resources, and for workers to start."""

    call_timeout_s: Seconds
    """Seconds one remote call may take."""

    collective_timeout_s: Seconds
    """Seconds one collective between ranks may take."""

    @property
    def address(self) -> str | None:
        """The existing Ray cluster to connect to; None if there is none."""
        return self.ray_address or env.get("RAY_ADDRESS") or None

    @property
    def num_ranks(self) -> int:
        """Worker processes over all machines."""
        return self.num_nodes * self.num_ranks_per_node


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
        """Import the module and call the function; what fails is a ``ConfigError``."""
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
