"""AdamW for any PyTorch module, in one update launch for all parameters that step alike."""

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fastbrain.kernels import AdamScalars, adam_step

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = ("step", *_MOMENTS)
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_REFUSED = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")


class FusedAdam(Optimizer):
    """`torch.optim.AdamW` by `fastbrain.kernels.adam_step`.

    A parameter without a gradient is left alone, and its count of updates stays. A step makes, for
    each distinct count, rate, betas and eps, one update launch and one of a single program that
    counts. The counts live on the host, so a CUDA graph cannot hold a step. State dictionaries have
    AdamW's layout and move to it and from it; moments have the parameter's dtype.

    Args:
        params: parameters or groups of them: FP32 (on a CPU also FP64), contiguous.
        lr: learning rate. A tensor of one element may change between steps; its range is checked
            unless it is on a card, where reading it would wait.
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

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ValueError: a group has come to hold a setting that the constructor refuses.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "FusedAdam counts updates on the host, which a captured step would not do again; "
                "capture forward and backward only, or fastbrain.kernels.adam_step"
            )
        for group in self.param_groups:
            _check_settings(group)
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

        Moments that are there keep their memory and get other values. A state that is refused
        changes nothing.

        Raises:
            ValueError: the state does not fit the parameters, or is not of AdamW with settings
                that the constructor takes.
        """
        # last before the change and first after it: hooks see what is loaded, and may mend it
        check = self.register_load_state_dict_pre_hook(_check_state_dict)
        fill = self.register_load_state_dict_post_hook(
            partial(_fill, kept=dict(self.state)), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()
            fill.remove()

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update(_fresh(p))
        return state


def _fresh(p: Tensor) -> dict[str, Tensor]:
    # the count lives on the host, as AdamW's: to tell who steps together must not wait for a card
    zeros = {name: torch.zeros_like(p.detach()) for name in _MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _fill(optimizer: Optimizer, kept: dict[Tensor, dict[str, Tensor]]) -> None:
    """Moves the state just loaded into the tensors that were there before."""
    for p, loaded in list(optimizer.state.items()):
        if loaded:
            state = kept.get(p) or _fresh(p)
            state["step"].fill_(float(loaded["step"]))
            for name in _MOMENTS:
                state[name].copy_(loaded[name])
            optimizer.state[p] = state


def _scalars(device: torch.device, rate: float | Tensor, count: int) -> AdamScalars:
    one = torch.ones((), dtype=torch.float32, device=device)
    lr = torch.empty((), dtype=torch.float64, device=device)
    return AdamScalars(
        lr=lr.copy_(rate.reshape(())) if isinstance(rate, Tensor) else lr.fill_(rate),
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
    absent = [name for name in _SETTINGS if name not in group]
    if absent:
        raise ValueError(f"FusedAdam has a setting for {', '.join(absent)}, got none")
    for option in _REFUSED:
        if group.get(option):
            raise ValueError(f"FusedAdam does not offer {option}, got {group[option]}")
    if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
        raise ValueError("FusedAdam decays weights apart from gradients, as AdamW and not as Adam")
    if not _is_rate(group["lr"]):
        raise ValueError(f"lr must be one finite number from 0 on, got {group['lr']}")
    for name in ("eps", "weight_decay"):
        if not _is_number(group[name]):
            raise ValueError(f"{name} must be a finite number from 0 on, got {group[name]}")
    betas = group["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(_is_number(beta) and beta < 1 for beta in betas):
        raise ValueError(f"betas must be two rates in [0, 1), got {betas}")


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and 0 <= float(x) < float("inf")


def _is_rate(lr: Any) -> bool:
    if not isinstance(lr, Tensor):
        return _is_number(lr)
    # to read one on a card would wait for it
    return lr.numel() == 1 and (lr.is_cuda or _is_number(lr.item()))


def _check_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuses what would fail, or mean something else, once it is half loaded."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"a state must have state and param_groups, got {list(state_dict)}")
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"the state must have {len(groups)} groups, got {len(saved)}")
    left = dict(state_dict["state"])
    for n, (group, loaded) in enumerate(zip(groups, saved, strict=True)):
        _check_settings(loaded)
        params, ids = group["params"], loaded.get("params", ())
        if len(ids) != len(params):
            raise ValueError(f"group {n} must have {len(params)} parameters, got {len(ids)}")
        for i, (p, key) in enumerate(zip(params, ids, strict=True)):
            state = left.pop(key, None)
            # one that has had no gradient yet has none
            if state:
                _check_state(f"state of parameter {i} of group {n}", p, state)
    if left:
        raise ValueError(f"the state must be of parameters of its groups, got {list(left)}")


def _check_state(where: str, p: Tensor, state: dict[str, Any]) -> None:
    if set(state) != set(_STATE):
        raise ValueError(f"{where} must have {', '.join(_STATE)}, got {list(state)}")
    count = state["step"]
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    if not _is_number(count) or count % 1:
        raise ValueError(f"{where}: step must be whole and not negative, got {count}")
    for name in _MOMENTS:
        x = state[name]
        if not isinstance(x, Tensor):
            raise ValueError(f"{where}: {name} must be a tensor, got {x!r}")
        if not x.is_floating_point() or x.layout != torch.strided:
            found = f"{x.dtype} in layout {x.layout}"
            raise ValueError(f"{where}: {name} must be dense floats, got {found}")
        # copying would broadcast
        if x.shape != p.shape:
            raise ValueError(
                f"{where}: {name} must have the shape {tuple(p.shape)}, got {tuple(x.shape)}"
            )


def _check_parameter(i: int, p: Tensor) -> None:
    allowed = (torch.float32,) if p.is_cuda else (torch.float32, torch.float64)
    if p.dtype not in allowed:
        raise ValueError(f"parameter {i} of the group must be float32, got {p.dtype}")
    if not p.is_contiguous():
        raise ValueError(f"parameter {i} of the group must be contiguous, got {p.stride()}")
