from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.single_controller.workers import Scaler


@pytest.fixture(scope="module")
def four_ranks(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    """Four ranks in two tensor-parallel pairs, for tests that leave the group usable."""
    pool = RayResourcePool([4], num_cpus_per_rank=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler, 3.0), grace_s=2.0) as group:
        group.set_up_mesh(2)
        yield group
