"""What oneDNN keeps of each size of a matrix is bounded by the environment of our processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hybridrl import env

_PROGRAM = """
import os
import torch
from pathlib import Path
from hybridrl.models import onednn

def resident_mib():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20

onednn.is_faster = lambda: True  # on every processor
model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
onednn.use_onednn(model)
assert type(model[0]) is onednn.OneDNNLinear
for number in range(300):
    if number == 30:
        before = resident_mib()
    model(torch.ones(200 + number, 256))
print(resident_mib() - before)
"""


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
def test_many_sizes_of_a_matrix_leave_little_in_memory() -> None:
    inherited = {
        name: value for name, value in env.everything().items() if not name.endswith("_CAPACITY")
    }  # tests/conftest.py sets the bounds for the tests themselves
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={
            **inherited,
            **env.process_environment(num_threads=1),
            "PYTHONPATH": env.python_path(),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 14 MiB; 186 without the bounds, 125 or 186 with one of the two alone.
    assert float(done.stdout) < 50
