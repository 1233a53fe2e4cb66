from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.errors import ResourceError
from hybridrl.trainer.cluster import require_device
from tests.runs.small import small_config


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_before_ray_would_wait_for_one(tmp_path: Path) -> None:
    cluster = replace(small_config(tmp_path / "run").cluster, device="cuda")
    with pytest.raises(ResourceError, match="no NVIDIA device; set cluster=cpu"):
        require_device(cluster)
    require_device(replace(cluster, ray_address="auto"))  # that cluster's nodes may have some
    require_device(replace(cluster, device="cpu"))
