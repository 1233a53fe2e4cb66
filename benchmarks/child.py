"""``python -m benchmarks.child config.yaml``: a run in a process of its own, without Hydra.

The file is a run folder's ``config.yaml``. For runs that are killed. Exit status: 0 done, 1 the run
failed, 2 configuration refused, 128 + the number of a signal that stopped it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import yaml

from hybridrl import env
from hybridrl.atomic_io import atomic_write_text
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.load import load_config
from hybridrl.errors import ConfigErrors, HybridRLError
from hybridrl.json_text import to_json_text
from hybridrl.processes.guard import kill_session
from hybridrl.trainer.interrupt import RunInterrupted, exit_status

_LAUNCH = "hybridrl.run.launch"


class Child:
    """A run in a process group of its own, so that all of it can be killed at once."""

    def __init__(self, config: ExperimentConfig, *, folder: Path) -> None:
        """Start it.

        Args:
            config: of the run; ``trainer.run_dir`` says where.
            folder: keeps its configuration and its output, ``child.yaml`` and ``child.txt``.
        """
        self._log = folder / "child.txt"
        file = folder / "child.yaml"
        atomic_write_text(file, to_yaml(config))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env.everything() | {"PYTHONPATH": env.python_path()},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """Kill driver, Ray and ranks at once, as a loss of power does. Twice is a no-op."""
        kill_session(self._process)

    def tail(self, num_lines: int = 12) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def to_yaml(config: ExperimentConfig) -> str:
    """Write a configuration in the form of a run folder's ``config.yaml``."""
    values = json.loads(to_json_text(asdict(config)))  # YAML has no tuples
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def main(file: Path) -> int:
    text = file.read_text(encoding="utf-8")
    try:
        import_module(_LAUNCH).run(load_config(read_yaml(text)), resolved_yaml=text)
    except HybridRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2 if isinstance(error, ConfigErrors) else 1
    except RunInterrupted as interrupt:
        return exit_status(interrupt.number)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
