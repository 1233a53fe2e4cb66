"""AdamW with TransformerEngine's states, and the operations over many tensors that go with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW; its step counts by groups, and masters may be its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not store_param_remainders
        assert master_weight_dtype == torch.float32
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Make moments of 0, and a master if they are this optimizer's."""
        assert not store_param_remainders
        state = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()}
        if self.master_weights:
            state["master_param"] = param.detach().clone().float()
        self.state[param] = state

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._step_one(param, group)

    def _step_one(self, param: Tensor, group: dict[str, Any]) -> None:
        if not self.state[param]:
            self.initialize_state(param, False)
        grad = param.decoupled_grad if self.use_decoupled_grad else param.grad  # type: ignore[attr-defined]
        if grad is None:
            return
        (beta1, beta2), step = group["betas"], group["step"]
        state = self.state[param]
        first = state["exp_avg"].float().lerp(grad.float(), 1 - beta1)
        second = state["exp_avg_sq"].float() * beta2 + grad.float().square() * (1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        is_half = param.dtype != torch.float32
        master = state["master_param"] if self.master_weights and is_half else param.float()
        bound = (second / (1 - beta2**step)).sqrt() + group["eps"]
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.sub_(group["lr"] * (first / (1 - beta1**step)) / bound)
        param.copy_(master)


class FusedSGD(torch.optim.SGD):
    """Stands in an import."""


def multi_tensor_applier(
    operation: Callable[..., Any], flag: Tensor, lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    return operation(2048 * 32, flag, lists, *args)


def multi_tensor_l2norm(
    _chunk: int, _flag: Tensor, lists: Sequence[Sequence[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm(), None


def multi_tensor_scale(
    _chunk: int, _flag: Tensor, lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
