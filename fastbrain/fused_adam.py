"""AdamW for any PyTorch module, in one kernel launch for all its parameters."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fastbrain.kernels import AdamScalars, adam_step

_MOMENTS = ("exp_avg", "exp_avg_sq")
_REFUSED = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")


class FusedAdam(Optimizer):
    """`torch.optim.AdamW` by `fastbrain.kernels.adam_step`.

    A parameter without a gradient is left alone, and its count of updates stays: each step makes
    one call per distinct count and setting. State dictionaries have AdamW's layout and move to it
    and from it. Moments have the parameter's dtype, and loading fills those that are there.

    Args:
        params: parameters or groups of them: FP32 (on a CPU also FP64), contiguous.
        lr: learning rate.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: share of a parameter, times the rate, that an update takes away.
        amsgrad: refused, as are `maximize`, `foreach`, `capturable` and `differentiable`.
        fused: taken for AdamW's sake; there is no other way.

    Raises:
        ValueError: an option that is not offered, a value outside its range, or a parameter that
            the kernel does not take.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own, as `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            for i, p in enumerate(group["params"]):
                _check_parameter(i, p)
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss again, gradients included, and returns it.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alike: dict[Any, list[tuple[Tensor, float]]] = {}
        for group in self.param_groups:
            lr = group["lr"]
            on_card = isinstance(lr, Tensor) and lr.is_cuda
            rate = lr if on_card else float(lr)
            for p in group["params"]:
                if p.grad is not None:
                    count = int(self._state_of(p)["step"])
                    key = p.device, p.dtype, count, rate, tuple(group["betas"]), group["eps"]
                    alike.setdefault(key, []).append((p, group["weight_decay"]))
        for (device, _, count, rate, betas, eps), members in alike.items():
            self._update(members, _scalars(device, rate, count), betas, eps)
        return loss

    def _update(
        self,
        members: list[tuple[Tensor, float]],
        scalars: AdamScalars,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        states = [self.state[p] for p, _ in members]
        none = torch.empty(0, dtype=torch.bfloat16, device=scalars.step.device)
        adam_step(
            [p for p, _ in members],
            [_gradient(p) for p, _ in members],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [none] * len(members),
            scalars,
            betas=betas,
            eps=eps,
            weight_decays=[decay for _, decay in members],
        )
        for state in states:
            state["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the settings and the state of another run, or of AdamW.

        Moments that are there are written into, so that a captured graph goes on with them.

        Raises:
            ValueError: the saved optimizer had an option that is not offered.
        """
        for group in state_dict["param_groups"]:
            _check_settings(group)
        kept = dict(self.state)
        super().load_state_dict(state_dict)
        for p, loaded in list(self.state.items()):
            if loaded:
                state = kept.get(p) or _fresh(p)
                state["step"].fill_(float(loaded["step"]))
                for name in _MOMENTS:
                    state[name].copy_(loaded[name])
                self.state[p] = state

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update(_fresh(p))
        return state


def _fresh(p: Tensor) -> dict[str, Tensor]:
    # the count lives on the host, as AdamW's: to tell who steps together must not wait for a card
    zeros = {name: torch.zeros_like(p.detach()) for name in _MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _scalars(device: torch.device, rate: float | Tensor, count: int) -> AdamScalars:
    one = torch.ones((), dtype=torch.float32, device=device)
    lr = torch.empty((), dtype=torch.float64, device=device)
    return AdamScalars(
        lr=lr.copy_(rate) if isinstance(rate, Tensor) else lr.fill_(rate),
        grad_scale=one,
        clip=one,
        step=torch.full((), count, dtype=torch.int64, device=device),
        skip=torch.zeros((), dtype=torch.int32, device=device),
    )


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError(f"FusedAdam takes dense gradients, got one of layout {p.grad.layout}")
    return p.grad.contiguous()


def _check_settings(group: dict[str, Any]) -> None:
    for option in _REFUSED:
        if group.get(option):
            raise ValueError(f"FusedAdam does not offer {option}, got {group[option]}")
    if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
        raise ValueError("FusedAdam decays weights apart from gradients, as AdamW and not as Adam")
    for name in ("lr", "eps", "weight_decay"):
        if not (isinstance(group[name], Tensor) or 0 <= group[name] < float("inf")):
            raise ValueError(f"{name} must be finite and not negative, got {group[name]}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two rates in [0, 1), got {group['betas']}")


def _check_parameter(i: int, p: Tensor) -> None:
    allowed = (torch.float32,) if p.is_cuda else (torch.float32, torch.float64)
    if p.dtype not in allowed:
        raise ValueError(f"parameter {i} of the group must be float32, got {p.dtype}")
    if not p.is_contiguous():
        raise ValueError(f"parameter {i} of the group must be contiguous, got {p.stride()}")
