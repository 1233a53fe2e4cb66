from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ray

from hybridrl.errors import DispatchError
from hybridrl.single_controller import (
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.single_controller.dispatch import registered_methods


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs), "traced"

    return wrapper


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, blocking=False, timeout_s=5.0)
    def overridden(self) -> str:
        return "base"

    @traced
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wrapped(self) -> str:
        return "wrapped"

    def plain(self) -> None: ...


class Derived(Base):
    def overridden(self) -> str:
        return f"derived from {super().overridden()}"


# As it stands in a project that uses verl; only the imports were changed.
@ray.remote
class PortedWorker(Worker):
    def __init__(self, config: dict[str, Any], role: str) -> None:
        super().__init__()
        self.config = config
        self.role = role

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.model = self.config["start"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: list[int]) -> list[str]:
        return [f"{self.role}{self.rank}: {self.model + row}" for row in data]


def test_registrations_are_inherited_also_by_overrides() -> None:
    methods = registered_methods(Derived)
    assert sorted(methods) == ["overridden", "wrapped"]
    assert methods["overridden"].execute is Execute.RANK_ZERO
    assert not methods["overridden"].is_blocking
    assert methods["overridden"].timeout_s == 5.0
    assert Derived().overridden() == "derived from base"  # without Ray it is a plain object


def test_overrides_and_decorated_methods_run_remotely(ray_cluster: None) -> None:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Derived)) as group:
        assert group.overridden().get() == "derived from base"
        assert group.wrapped() == [("wrapped", "traced")] * 2


def test_a_worker_written_for_verl_runs_with_changed_imports(ray_cluster: None) -> None:
    resource_pool = RayResourcePool(process_on_nodes=[2])
    ray_cls_with_init = RayClassWithInitArgs(cls=PortedWorker, config={"start": 10}, role="actor")
    wg = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init)
    wg.init_model()
    assert wg.update_actor([1, 2, 3]) == ["actor0: 11", "actor0: 12", "actor1: 13"]
    with pytest.raises(DispatchError, match=r"update_actor\(data"):
        wg.update_actor()
    wg.shutdown()


def test_a_mode_that_is_not_a_dispatch_is_refused_at_once() -> None:
    with pytest.raises(DispatchError, match="'one_to_all' is not a Dispatch"):
        register(dispatch_mode="one_to_all")  # type: ignore[arg-type]  # the mistake itself
