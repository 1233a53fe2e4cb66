"""Copies the stand-ins into the site-packages of the Python that runs this; may be run again.

Copies, and not a path to this folder: a server of SGLang is a tree of processes that all import
from site-packages, whatever folder they start in, and an environment outlives a checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

STAND_INS = Path(__file__).with_name("site")
HOOK = "torchvision_without_operators"
PTH = "sglang_stand_ins.pth"


def install(site_packages: Path) -> None:
    """Put each file in place by renaming, so that a process that starts now sees it whole."""
    with tempfile.TemporaryDirectory(dir=site_packages, prefix=".stand_ins.") as staging:
        for source in sorted(STAND_INS.rglob("*.py"), reverse=True):  # __init__ after its modules
            target = site_packages / source.relative_to(STAND_INS)
            target.parent.mkdir(exist_ok=True)
            staged = Path(staging, source.name)
            shutil.copyfile(source, staged)
            os.replace(staged, target)
        staged = Path(staging, PTH)
        staged.write_text(f"import {HOOK}; {HOOK}.install()\n", encoding="utf-8")
        os.replace(staged, site_packages / PTH)


if __name__ == "__main__":
    site_packages = Path(sysconfig.get_paths()["purelib"])
    if (site_packages / "sglang_kernel").exists() or any(site_packages.glob("sglang_kernel-*")):
        sys.exit(f"{site_packages} has SGLang's own kernels: it needs no stand-ins")
    install(site_packages)
