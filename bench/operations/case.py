"""What a benchmark of one operation is: its sizes, its contenders, what it has to move and do.

A case builds its inputs once and gives callables that take turns: `reference`, `fused` and the
peers. Each runs forward, or forward and backward; an optimizer step or a norm is one call. Inputs
are normal random numbers in BF16 with FP32 masters, as in a training step under mixed precision.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS = ("fused", "reference")


@dataclass(frozen=True)
class Sizes:
    """Letters as in `fastbrain.config`, k experts per token."""

    B: int = 8
    S: int = 1024
    D: int = 1024
    H: int = 16
    G: int = 4
    K: int = 64
    F: int = 512
    E: int = 8
    k: int = 2
    V: int = 32_000
    parameters: int = 341_000_000

    @property
    def N(self) -> int:
        return self.B * self.S


CHAPTER = Sizes()
TOY = Sizes(B=1, S=32, D=32, H=2, G=1, K=16, F=16, E=4, k=2, V=64, parameters=3000)


@dataclass
class Case:
    """One operation in one direction.

    Attributes:
        name: the operation and what is timed of it.
        contenders: what takes turns, by name.
        bytes: that it has to move, in all.
        flops: that it has to do.
        absent: peers that cannot run here, and what would help.
    """

    name: str
    contenders: dict[str, Callable[[], Any]] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)


Build = Callable[[Sizes, torch.device], Iterator[Case]]
Op = Callable[..., Any]


@dataclass
class Ways:
    """The ways to compute one differentiable operation, and the tensors that get gradients."""

    found: dict[str, tuple[Op, tuple[Tensor, ...]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(
        self, name: str, op: Op, leaves: tuple[Tensor, ...], missing: str | None = None
    ) -> None:
        """Adds a way; `missing` says why it cannot run here."""
        if missing is None:
            self.found[name] = op, leaves
        else:
            self.absent[name] = missing

    def forward(self, name: str, bytes: float, flops: float) -> Case:
        """The case of all ways without gradients."""
        runs = {n: _forward(op) for n, (op, _) in self.found.items()}
        return Case(name, runs, bytes, flops, self.absent)

    def both(self, name: str, bytes: float, flops: float) -> Case:
        """The case of all ways forward and backward."""
        runs = {n: _both(op, leaves) for n, (op, leaves) in self.found.items()}
        return Case(name, runs, bytes, flops, self.absent)


def _forward(op: Op) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return op()

    return run


def _both(op: Op, leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    incoming: list[Tensor] = []

    def run() -> Any:
        outs = op()
        outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.requires_grad]
        if not incoming:
            # contiguous whatever the strides of the result, as the layer above sends it
            incoming.extend(torch.randn(o.shape, device=o.device).to(o.dtype) for o in outs)
        return torch.autograd.grad(outs, leaves, incoming)

    return run


def leaf(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal random numbers that want a gradient."""
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()
