import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.sglang.stand_ins.install import STAND_INS, install

# Triton's interpreter runs SGLang's kernel on a CPU, in a process of its own.
COMPARE_HASHES = """
import sgl_kernel, torch, triton
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel as kernel
seeds = torch.tensor([0, 1, 2**40 + 7, 2**63 - 1], dtype=torch.uint64)
positions, columns = torch.tensor([0, 5, 70000, 3]), torch.arange(300)
expected = torch.empty(4, 300, dtype=torch.uint32)
kernel[(4, 1)](seeds, positions, columns, expected, 4, 300, BLOCK_SIZE=1024)
found = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, positions, columns)
print(int((found != expected).sum()), len(set(found.flatten().tolist())))
"""

WITHOUT_A_SERVER = """
import sys, torch
made_by_torch = torch.empty, torch.Tensor.cuda
import sglang.srt.utils
print((torch.empty, torch.Tensor.cuda) == made_by_torch, "sgl_kernel" in sys.modules)
"""


def run(program: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_seeds_are_hashed_as_by_the_kernel_of_sglang() -> None:
    assert run(COMPARE_HASHES, TRITON_INTERPRET="1") == "0 1200"


@pytest.mark.nightly
def test_a_process_that_serves_nothing_keeps_torch_as_it_is() -> None:
    assert run(WITHOUT_A_SERVER) == "True False"


def test_a_kernel_without_a_stand_in_is_imported_and_raises_when_called() -> None:
    raising = (
        "import sgl_kernel as k\ntry: k.fp8_blockwise_scaled_mm(1)\nexcept {}: print('raised')"
    )
    assert run(raising.format("NotImplementedError")) == "raised"


@pytest.mark.parametrize("num_times", [1, 2])
def test_installing_twice_leaves_what_installing_once_does(tmp_path: Path, num_times: int) -> None:
    for _ in range(num_times):
        install(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    written = {str(path.relative_to(STAND_INS)) for path in STAND_INS.rglob("*.py")}
    own = {
        "sglang_cpu.pth",
        *(f"sglang_cpu-1.0.dist-info/{n}" for n in ("METADATA", "entry_points.txt")),
    }
    assert files == written | own
    assert metadata.Distribution.at(tmp_path / "sglang_cpu-1.0.dist-info").entry_points
