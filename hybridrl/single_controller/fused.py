"""The worker classes of a group: one class with its arguments, or several in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.errors import DispatchError
from hybridrl.single_controller.worker import Worker, WorkerSpec


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor, which runs later, on the ranks.

    Args:
        cls: a subclass of `Worker`, plain or wrapped in ``ray.remote`` as verl writes it.
        args: of the constructor; they are pickled once for all ranks.
        kwargs: likewise.

    Raises:
        DispatchError: ``cls`` is not a subclass of `Worker`.
    """

    def __init__(self, cls: Any, *args: object, **kwargs: object) -> None:  # noqa: ANN401
        worker_cls = cls if isinstance(cls, type) else cls.__ray_actor_class__
        if not issubclass(worker_cls, Worker):
            raise DispatchError(
                f"{worker_cls.__name__} is not a worker; "
                "make it a subclass of hybridrl.single_controller.Worker"
            )
        self.roles: dict[str, WorkerSpec] = {"": WorkerSpec(worker_cls, args, kwargs)}
        """By prefix; a class that is not fused has the empty prefix."""


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Fuse several worker classes, so that each rank holds one instance of each in one process.

    The instances are built in the given order and find each other in ``self.fused``. On the group
    their methods carry the prefix (``group.actor_update``); ``group.spawn({"actor"})`` gives a
    group without it.

    Args:
        class_dict: by prefix, which must be the beginning of a Python name.

    Raises:
        DispatchError: nothing to fuse, a bad prefix, or a class that is fused already.
    """
    for prefix, part in class_dict.items():
        if not prefix.isidentifier() or list(part.roles) != [""]:
            raise DispatchError(
                f"cannot fuse {prefix!r}: a prefix is a Python name, and its class is not fused "
                "itself; pass for example {'actor': RayClassWithInitArgs(ActorWorker)}"
            )
    if not class_dict:
        raise DispatchError("nothing to fuse; pass {prefix: RayClassWithInitArgs(cls)}")
    fused = RayClassWithInitArgs.__new__(RayClassWithInitArgs)
    fused.roles = {prefix: part.roles[""] for prefix, part in class_dict.items()}
    return fused
