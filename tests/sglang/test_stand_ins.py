import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.sglang.stand_ins.install import STAND_INS, install

WITHOUT_A_SERVER = """
import sys, torch
made_by_torch = torch.empty, torch.Tensor.cuda
import sglang.srt.utils
print((torch.empty, torch.Tensor.cuda) == made_by_torch, "sgl_kernel" in sys.modules)
"""


def test_seeds_are_hashed_as_by_sglang_and_a_kernel_without_a_stand_in_raises(
    by_itself: Sequence[str],
) -> None:
    assert {"hashes: 0 1200", "raised"} <= set(by_itself)


@pytest.mark.nightly
def test_a_process_that_serves_nothing_keeps_torch_as_it_is() -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_A_SERVER]
    assert subprocess.check_output(command, text=True, timeout=120).strip() == "True False"


def test_installing_again_leaves_what_belongs_there(tmp_path: Path) -> None:
    for _ in range(2):
        install(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    written = {str(path.relative_to(STAND_INS)) for path in STAND_INS.rglob("*.py")}
    own = {
        "sglang_cpu.pth",
        *(f"sglang_cpu-1.0.dist-info/{n}" for n in ("METADATA", "entry_points.txt")),
    }
    assert files == written | own
    assert metadata.Distribution.at(tmp_path / "sglang_cpu-1.0.dist-info").entry_points
