"""``python -m hybridrl.export RUN_FOLDER``: a checkpoint as folders that others load.

It works during the run, without a cluster: one process reads the files of all ranks. It writes
``hf-step-N`` (with LoRA the adapter merged into it, and ``adapter-step-N``) into the run folder, or
with ``--output FOLDER`` that folder (and ``FOLDER-adapter``).
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from hybridrl.config.eval import split_checkpoint
from hybridrl.errors import HybridRLError

_EXPORT = "hybridrl.run.export_checkpoint"  # imports torch, which --help needs not wait for


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.export", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="or one of its checkpoints/step-N")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest if left out")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="to write; must be new")
    options = parser.parse_args()
    try:
        export = import_module(_EXPORT).export_checkpoint
        run_folder, step = split_checkpoint(str(options.run_folder))
        step = step if options.step is None else options.step
        for folder in export(run_folder, step=step, output=options.output):
            sys.stdout.write(f"{folder}\n")
    except HybridRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
