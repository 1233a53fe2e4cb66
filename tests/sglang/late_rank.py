"""Lets the second rank of a server load folders late, or not at all and without a word.

``$LATE_RANK`` names a file with the seconds that it waits before it loads; without a number it does
not, as a rank on a machine that does not see the folder.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import distributed


def install() -> None:
    """Change the class of SGLang that loads: before a server is forked."""
    folder = "sglang.srt.model_executor.model_runner_components"
    updater: Any = import_module(f"{folder}.weight_updater").WeightUpdater
    load = updater.update_weights_from_disk

    def load_late(self: object, *args: object, **kwargs: object) -> tuple[bool, str]:
        if "LATE_RANK" in os.environ and distributed.get_rank() == 1:
            try:
                time.sleep(float(Path(os.environ["LATE_RANK"]).read_text()))
            except ValueError:
                return False, "there is no such folder"
        loaded: tuple[bool, str] = load(self, *args, **kwargs)
        return loaded

    updater.update_weights_from_disk = load_late
