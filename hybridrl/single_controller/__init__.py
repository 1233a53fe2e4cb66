"""Call methods on many processes as if they were one object. Generic over Ray; knows no RL.

A worker class written for verl ports by importing from here and by changing its batch types::

    class Trainer(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def update(self, batch): ...

    pool = RayResourcePool(process_on_nodes=[2], num_cpus_per_rank=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Trainer)) as group:
        group.update(batch)
"""

from hybridrl.single_controller.dispatch import (
    Dispatch,
    Execute,
    RankLayout,
    ResultLayout,
    Whole,
    dispatch_by_mesh,
    register,
)
from hybridrl.single_controller.payload import (
    PayloadOps,
    register_after_call,
    register_payload,
    register_reducer,
)
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.worker import (
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
)
from hybridrl.single_controller.worker_group import Future, RayWorkerGroup, WorkerGroup

__all__ = [
    "Dispatch",
    "Execute",
    "Future",
    "PayloadOps",
    "RankLayout",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResultLayout",
    "Whole",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "dispatch_by_mesh",
    "register",
    "register_after_call",
    "register_payload",
    "register_reducer",
]
