"""The state that one model's updates need, and the updates themselves.

Every step reads its rate, scale, clip factor, skip flag and step counter from the device and never
waits for it.
"""

import math
import warnings

import torch
from torch import Tensor
from torch.nn import Parameter

from fastbrain.errors import InvalidConfig
from fastbrain.kernels import AdamScalars, adam_step, grad_norm
from fastbrain.layers import Weight
from fastbrain.optim import Adam, Lion, Optimizer, in_range
from fastbrain.parallel.ranks import Ranks
from fastbrain.parallel.shards import fill, is_sharded, part
from fastbrain.transformer import Transformer, pieces


class OptimizerState:
    """The moments and the step counter of one module's parameters, and the updates themselves.

    A frozen parameter has no moments and is never updated. Moments are FP32 and appear at the
    first update or when they are asked for, so that a model that only answers carries none.

    Of a module that is divided among ranks each updates its own part, and the norm is that of all
    parts. Replicas update alike, as their gradients are the same.
    """

    def __init__(self, module: Transformer) -> None:
        self._module = module
        self._ranks: Ranks | None = None
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._step = torch.zeros((), dtype=torch.int64)
        self.cold_since: int | None = None
        self._vectors = {p.parameter for p in pieces(module.config) if p.rows == 1}

    def forget_moments(self) -> None:
        """Starts anew with zero moments, as when other parameters are to be trained."""
        self._moments = {}
        self._vectors = {p.parameter for p in pieces(self._module.config) if p.rows == 1}
        self.set_step(int(self._step))

    @property
    def step(self) -> Tensor:
        """Updates applied so far: 0-d int64 on the module's device."""
        return self._step

    def set_step(self, step: int) -> None:
        """Sets the counter, which bias correction reads."""
        if not isinstance(step, int) or not 0 <= step < 2**62:
            raise InvalidConfig(
                f"the optimizer's step counter must be a whole number from 0 to 2**62, got {step}"
            )
        self._step = torch.full((), step, dtype=torch.int64, device=self._device())
        self.cold_since = step if step and not self.has_moments() else None

    def distribute(self, ranks: Ranks) -> None:
        """Says that the module has just been replicated over ranks, or divided among them."""
        self._ranks = ranks
        self._step = self._step.to(ranks.device)
        before, self._moments = self._moments, {}
        if before:
            first, second = self.moments()
            for name, (m, v) in before.items():
                fill(first[name], m)
                fill(second[name], v)

    def clear_gradients(self) -> None:
        """Drops the accumulated gradients, or zeroes them where DDP keeps them in its buckets."""
        self._module.zero_grad(set_to_none=self._ranks is None or is_sharded(self._module))

    def has_moments(self) -> bool:
        """Whether an update or a file has filled the moments."""
        return any(bool(part(m).any()) for m, _ in self._moments.values())

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """First and second moments by parameter name; writing to them writes the state."""
        for name, p in self._trainable():
            if name not in self._moments:
                self._moments[name] = torch.zeros_like(p.detach()), torch.zeros_like(p.detach())
        first = {name: m for name, (m, _) in self._moments.items()}
        return first, {name: v for name, (_, v) in self._moments.items()}

    def mark_warm(self) -> None:
        """Says that the moments now belong to the counter, as after a file was loaded."""
        self.cold_since = None

    def to(self, device: torch.device) -> None:
        """Moves moments and counter along with the module."""
        self._step = self._step.to(device)
        self._moments = {n: (m.to(device), v.to(device)) for n, (m, v) in self._moments.items()}

    def grad_norm(self) -> Tensor:
        """L2 norm of the accumulated gradients of all parameters: 0-d FP32."""
        grads = [part(p.grad) for p in self._module.parameters() if p.grad is not None]
        norm = grad_norm(grads) if grads else torch.zeros((), device=self._device())
        if self._ranks is None or not is_sharded(self._module):
            return norm
        # wider, so that squaring what every rank has neither overflows nor vanishes
        return self._ranks.sum(norm.double().square()).sqrt().float()

    def update(
        self,
        optimizer: Optimizer,
        scale: float,
        max_norm: float | None = None,
        loss: Tensor | None = None,
    ) -> Tensor | None:
        """Applies the accumulated gradients times `scale`, and clears them.

        Args:
            optimizer: the rule.
            scale: factor of every gradient, such as 1 / accumulation.
            max_norm: where the norm of the scaled gradients exceeds it, they are scaled down to
                it; where it is not finite, nothing is updated and the counter stays.
            loss: 0-d, looked at together with the norm.

        Returns:
            The norm of the scaled gradients before clipping, 0-d FP32; None without `max_norm`.
        """
        optimizer.check()
        if not math.isfinite(scale):
            raise InvalidConfig(f"scale must be a finite number, got {scale}")
        if max_norm is not None:
            in_range("max_norm", max_norm, 0.0)
        self._warn_when_cold(optimizer)
        device = self._device()
        clip = torch.ones((), dtype=torch.float32, device=device)
        skip = torch.zeros((), dtype=torch.int32, device=device)
        norm = None
        if max_norm is not None:
            norm = self.grad_norm() * abs(scale)
            clip = torch.where(norm > max_norm, max_norm / norm, clip)
            finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
            clip, skip = torch.where(finite, clip, 1.0), (~finite).to(torch.int32)
        scalars = AdamScalars(
            lr=torch.full((), optimizer.learning_rate, dtype=torch.float32, device=device),
            grad_scale=torch.full((), scale, dtype=torch.float32, device=device),
            clip=clip,
            step=self._step,
            skip=skip,
        )
        self._apply(optimizer, scalars)
        self.clear_gradients()
        return norm

    def _apply(self, optimizer: Optimizer, scalars: AdamScalars) -> None:
        own = [(name, p) for name, p in self._trainable() if part(p.detach()).numel()]
        names = [name for name, _ in own]
        none = torch.empty(0, device=self._device())
        grads = [none if p.grad is None else part(p.grad).contiguous() for _, p in own]
        params = [part(p.detach()) for _, p in own]
        decays = [self._decay(optimizer, name) for name in names]
        if isinstance(optimizer, Adam):
            first, second = self.moments()
            weights, shadows = self._shadows()
            adam_step(
                params,
                grads,
                [part(first[name]) for name in names],
                [part(second[name]) for name in names],
                [shadows.get(name, none) for name in names],
                scalars,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decays=decays,
            )
            for weight in weights:
                weight.keep_shadow_in_step()
            return
        with torch.no_grad():
            apply = scalars.skip == 0
            for name, p, grad, decay in zip(names, params, grads, decays, strict=True):
                g = grad.to(p.dtype) * (scalars.grad_scale * scalars.clip) if grad.numel() else None
                if isinstance(optimizer, Lion):
                    self._lion(optimizer, name, p, g, decay, apply)
                elif g is not None:
                    p.copy_(torch.where(apply, p - scalars.lr * g, p))
            scalars.step.add_(apply)

    def _lion(
        self,
        optimizer: Lion,
        name: str,
        p: Tensor,
        g: Tensor | None,
        decay: float,
        apply: Tensor,
    ) -> None:
        (b1, b2), rate = optimizer.betas, optimizer.learning_rate
        first, _ = self.moments()
        m = part(first[name])
        g = torch.zeros_like(p) if g is None else g
        direction = (b1 * m + (1 - b1) * g).sign_()
        p.copy_(torch.where(apply, p - rate * (direction + decay * p), p))
        m.copy_(torch.where(apply, b2 * m + (1 - b2) * g, m))

    def _decay(self, optimizer: Optimizer, name: str) -> float:
        if not isinstance(optimizer, Adam | Lion):
            return 0.0
        spared = not optimizer.decay_vectors and name in self._vectors
        return 0.0 if spared else optimizer.weight_decay

    def _shadows(self) -> tuple[list[Weight], dict[str, Tensor]]:
        """The weights that have a shadow, and the shadows by parameter name, up to date.

        An update that is skipped writes neither, so they have to agree before it.
        """
        weights, shadows = [], {}
        for name, weight in self._module.named_modules():
            if isinstance(weight, Weight) and weight.shadow is not None:
                shadow = weight.operand(weight.shadow.dtype)
                assert shadow is not None
                weights.append(weight)
                shadows[f"{name}.weight"] = shadow
        return weights, shadows

    def _warn_when_cold(self, optimizer: Optimizer) -> None:
        if self.cold_since is not None and isinstance(optimizer, Adam):
            warn_cold(self.cold_since, "this step")
        self.cold_since = None

    def _trainable(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]

    def _device(self) -> torch.device:
        return next(self._module.parameters()).device


def warn_cold(step: int, where: str) -> None:
    """Warns that a counter without moments makes Adam's first updates too large."""
    warnings.warn(
        f"{where}: the optimizer's step counter is {step} but its moments are zero, so Adam's "
        "first updates come out up to 6.6 times the learning rate; load the optimizer state, or "
        "call set_optimizer_step(0) and warm the rate up again",
        stacklevel=4,
    )
