from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.errors import ResourceError
from hybridrl.trainer.cluster import ray_cluster
from tests.runs.small import small_config


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_at_once_and_nothing_starts(tmp_path: Path) -> None:
    cluster = replace(small_config(tmp_path / "run").cluster, device="cuda")
    began = time.monotonic()
    with (
        pytest.raises(ResourceError, match="no NVIDIA device; set cluster=cpu"),
        ray_cluster(cluster),
    ):
        pytest.fail("Ray was started")
    assert time.monotonic() - began < cluster.start_timeout_s
