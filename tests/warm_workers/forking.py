"""A server of forks, and a Ray cluster whose workers it forks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from ray._private import parameter

from tests.warm_workers.set_up import SOCKET, address_of

_SET_UP = Path(__file__).with_name("set_up.py")


class _Parameters(parameter.RayParams):
    """Ray's own, but another program sets a worker up, and nobody watches logs or scales."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, setup_worker_path=str(_SET_UP), **kwargs)
        self.include_log_monitor = False  # it reads each log of a session twice a second
        self.no_monitor = True


@contextlib.contextmanager
def workers_forked(folder: Path) -> Iterator[None]:
    """One Ray cluster that is started within has forked workers; they end with the context.

    Args:
        folder: for the log of the server.
    """
    later = (
        *("ray._private.workers.default_worker", "hybridrl.workers.actor_rollout"),
        "tests.sglang.in_workers",
        *("pydantic.v1", "starlette.datastructures"),  # Ray's; pyarrow would start threads
    )
    with (
        forks_served(folder, SOCKET, ("hybridrl.models.adapter", "tensordict"), later),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(parameter, "RayParams", _Parameters)
        yield


@contextlib.contextmanager
def forks_served(
    folder: Path,
    variable: str,
    names: Sequence[str],
    later: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server forks processes that have imported modules; all end with the context.

    Args:
        folder: for the log of the server.
        variable: has the name of the server's socket within the context.
        names: modules that are imported at once.
        later: modules that are imported when the first process is asked for.
        variables: of the processes that are forked, beside those of this one.
    """
    with socket.socket(socket.AF_UNIX) as listener, pytest.MonkeyPatch.context() as patch:
        name = f"hybridrl-workers-{uuid.uuid4().hex}"
        listener.bind(address_of(name))
        listener.listen(64)
        imported = (",".join(names), ",".join(later))
        with (folder / "workers.log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.warm_workers.server"),
                    *(str(listener.fileno()), *imported),
                ],
                stdin=subprocess.PIPE,  # the server ends with it
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                env={**os.environ, **(variables or {})},
            )
        patch.setenv(variable, name)
        try:
            yield
        finally:
            server.communicate()
