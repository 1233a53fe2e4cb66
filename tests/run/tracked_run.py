"""A part of a tracked run: ``python -m tests.run.tracked_run FOLDER TRACKER FIRST LAST``."""

import sys
from pathlib import Path
from typing import Any

from hybridrl.config.trainer import TrackingConfig
from hybridrl.metrics import Mean
from hybridrl.run.run_folder import RunLogger

folder, tracker, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
trackers: Any = (tracker,)
tracking = TrackingConfig(
    trackers=trackers,
    project="digits",
    function=None,
    num_samples_per_step=0,
    trace=False,
    live="off",
)
resumes = folder.is_dir()
with RunLogger(
    folder,
    overwrite=False,
    resumes=resumes,
    resolved_yaml="seed: 7\n",
    settings={"seed": 7, "actor": {"optimizer": {"lr": 3e-5}}},
    config=tracking,
) as run:
    if resumes:
        run.rewind(first - 1, sizes=run.sizes(), elapsed_s=0.0)
    for step in range(first, last + 1):
        run.log_step(step, {"reward/mean": Mean(step / 10), "policy/grad_norm": Mean(float("nan"))})
