"""Copies the stand-ins into the site-packages of the Python that runs this; may be run again.

Copies, and not a path to this folder: a server of SGLang is a tree of processes that all import
from site-packages, whatever folder they start in, and an environment outlives a checkout.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

STAND_INS = Path(__file__).with_name("site")
WRITTEN = {
    # Run whenever Python starts.
    "sglang_cpu.pth": "import sglang_cpu.torchvision_operators as t; t.install()\n",
    # How SGLang finds its plug-ins.
    "sglang_cpu-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang_cpu\nVersion: 1.0\n",
    "sglang_cpu-1.0.dist-info/entry_points.txt": (
        "[sglang.srt.plugins]\ncpu_stand_ins = sglang_cpu.plugin:install\n"
    ),
}


def install(site_packages: Path) -> None:
    """Put each file in place by renaming, so that a process that starts now sees it whole."""
    sources = sorted(STAND_INS.rglob("*.py"), reverse=True)  # a package after its modules
    texts = {str(path.relative_to(STAND_INS)): path.read_text(encoding="utf-8") for path in sources}
    for name, text in {**texts, **WRITTEN}.items():
        target = site_packages / name
        target.parent.mkdir(exist_ok=True)
        staged = target.with_suffix(f".{os.getpid()}")
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, target)


if __name__ == "__main__":
    site_packages = Path(sysconfig.get_paths()["purelib"])
    if (site_packages / "sglang_kernel").exists() or any(site_packages.glob("sglang_kernel-*")):
        sys.exit(f"{site_packages} has SGLang's own kernels: it needs no stand-ins")
    install(site_packages)
