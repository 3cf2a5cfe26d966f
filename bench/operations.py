"""Every hot operation at the shapes of the chapter's model, with the peer that a user would pick.

A case builds its inputs once and gives callables that take turns: `reference`, `fused` and the
peers. Each runs forward, or forward and backward; an optimizer step or a norm is one call. Inputs
are normal random numbers in BF16 with FP32 masters, as in a training step under mixed precision.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbrain.kernels import AdamScalars, fused, reference


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
    """

    name: str
    contenders: dict[str, Callable[[], Any]] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0


def cases(sizes: Sizes, device: torch.device, peers: bool = True) -> Iterator[Case]:
    """All cases, one at a time, so that only one holds memory."""
    torch.manual_seed(0)
    for build in (_attention, _experts, _head, _adam, _grad_norm, _rms_norm, _rotary, _swiglu):
        for case in build(sizes, device):
            if not peers:
                case.contenders = {
                    n: c for n, c in case.contenders.items() if n in ("fused", "reference")
                }
            yield case


Op = Callable[..., Any]


def _pair(
    name: str,
    ops: dict[str, tuple[Op, tuple[Tensor, ...]]],
    forward: tuple[float, float],
    both: tuple[float, float],
) -> Iterator[Case]:
    """Forward, and forward with backward, of differentiable operations on given leaves."""
    yield Case(f"{name} forward", {n: _forward(op) for n, (op, _) in ops.items()}, *forward)
    yield Case(f"{name} forward+backward", {n: _both(*op) for n, op in ops.items()}, *both)


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
            incoming.extend(torch.randn_like(o) for o in outs)
        return torch.autograd.grad(outs, leaves, incoming)

    return run


def _leaf(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def _attention(z: Sizes, device: torch.device) -> Iterator[Case]:
    q = _leaf(z.B, z.S, z.H, z.K, device=device)
    k, v = (_leaf(z.B, z.S, z.G, z.K, device=device) for _ in range(2))
    leaves = (q, k, v)

    def sdpa() -> Tensor:
        heads = (x.transpose(1, 2) for x in leaves)
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    ops: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
        "fused": (lambda: fused.causal_attention(*leaves), leaves),
        "reference": (lambda: reference.causal_attention(*leaves), leaves),
        "SDPA": (sdpa, leaves),
    }
    unit = z.B * z.H * z.S**2 * z.K
    traffic = 4 * z.N * (z.H + z.G) * z.K
    yield from _pair("attention", ops, (traffic, 2 * unit), (3 * traffic, 7 * unit))


def _experts(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = _leaf(z.N, z.D, device=device)
    gate_up = _leaf(z.E, 2 * z.F, z.D, device=device, dtype=torch.float32)
    down = _leaf(z.E, z.D, z.F, device=device, dtype=torch.float32)
    shadows = (gate_up.detach().bfloat16(), down.detach().bfloat16())
    wide = tuple(w.clone().requires_grad_() for w in shadows)
    scores = torch.rand(z.N, z.E, device=device)
    ids = scores.topk(z.k, dim=1).indices
    gates = torch.rand(z.N, z.k, device=device).requires_grad_()

    def grouped_mm() -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        offsets = torch.bincount(flat, minlength=z.E).cumsum(0).int()
        rows = x[order // z.k]
        gate, up = torch._grouped_mm(rows, wide[0].mT, offs=offsets).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, wide[1].mT, offs=offsets)
        weighted = y * gates.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, order // z.k, weighted)

    leaves = (x, gate_up, down, gates)
    ops: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
        "fused": (lambda: fused.expert_ffn(x, gate_up, down, ids, gates, shadows), leaves),
        "reference": (lambda: reference.expert_ffn(x, gate_up, down, ids, gates, shadows), leaves),
        "grouped_mm": (grouped_mm, (x, *wide, gates)),
    }
    slots = z.N * z.k
    flops = 6 * slots * z.D * z.F
    traffic = 2 * (3 * slots * z.D + 4 * slots * z.F + 3 * z.E * z.F * z.D + z.N * z.D)
    yield from _pair("experts", ops, (traffic, flops), (3 * traffic, 3 * flops))


def _head(z: Sizes, device: torch.device) -> Iterator[Case]:
    hidden = _leaf(z.N, z.D, device=device)
    weight = _leaf(z.V, z.D, device=device, dtype=torch.float32)
    shadow = weight.detach().bfloat16()
    narrow = shadow.clone().requires_grad_()
    targets = torch.randint(z.V, (z.N,), device=device)
    everywhere = torch.ones(z.N, dtype=torch.bool, device=device)
    quarter = torch.rand(z.N, device=device) < 0.25
    rows = int(quarter.sum())

    def loss(twin: Any, mask: Tensor, max_rows: int | None = None) -> Tensor:
        out: Tensor = twin.linear_cross_entropy(
            hidden, weight, targets, mask, max_rows=max_rows, shadow=shadow
        )[0]
        return out

    leaves = (hidden, weight)
    flops = 6 * z.N * z.D * z.V
    traffic = 12.0 * z.N * z.V
    contenders = {
        "fused": _both(lambda: loss(fused, everywhere), leaves),
        "reference": _both(lambda: loss(reference, everywhere), leaves),
        "unchunked": _both(
            lambda: F.cross_entropy((hidden @ narrow.T).float(), targets, reduction="sum"),
            (hidden, narrow),
        ),
    }
    yield Case("head and loss forward+backward", contenders, traffic, flops)
    contenders = {
        "fused": _both(lambda: loss(fused, quarter, rows), leaves),
        "reference": _both(lambda: loss(reference, quarter, rows), leaves),
    }
    yield Case("head and loss, 25% of rows", contenders, traffic / 4, flops / 4)


def _adam(z: Sizes, device: torch.device) -> Iterator[Case]:
    sizes = [z.parameters // 20] * 20
    p, g, m, v = ([torch.randn(n, device=device) for n in sizes] for _ in range(4))
    v = [x.square() for x in v]
    shadows = [x.bfloat16() for x in p]
    scalars = AdamScalars(
        *(torch.full((), x, device=device) for x in (1e-5, 1.0, 1.0)),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.int32, device=device),
    )

    def step(twin: Any) -> None:
        twin.adam_step(
            *(p, g, m, v, shadows, scalars),
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decays=[0.1] * len(p),
        )

    theirs = [x.clone().requires_grad_() for x in p]
    for x, grad in zip(theirs, g, strict=True):
        x.grad = grad
    optimizer = torch.optim.AdamW(theirs, lr=1e-5, fused=True)

    def fused_adamw() -> None:
        optimizer.step()
        torch._foreach_copy_(shadows, [x.detach() for x in theirs])

    contenders: dict[str, Callable[[], Any]] = {
        "fused": lambda: step(fused),
        "AdamW fused + cast": fused_adamw,
    }
    yield Case("adam_step", contenders, 30.0 * sum(sizes))


def _grad_norm(z: Sizes, device: torch.device) -> Iterator[Case]:
    grads = [torch.randn(z.parameters // 20, device=device) for _ in range(20)]
    contenders: dict[str, Callable[[], Any]] = {
        "fused": lambda: fused.grad_norm(grads),
        "reference": lambda: reference.grad_norm(grads),
        "get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
    }
    yield Case("grad_norm", contenders, 4.0 * sum(x.numel() for x in grads))


def _rms_norm(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = _leaf(z.N, z.D, device=device)
    residual = _leaf(z.N, z.D, device=device, dtype=torch.float32)
    weight = _leaf(z.D, device=device, dtype=torch.float32)
    leaves = (x, residual, weight)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float() + residual
        return (F.rms_norm(h, (z.D,), weight, 1e-6)).bfloat16(), h

    compiled = torch.compile(plain)
    ops: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
        "fused": (lambda: fused.rms_norm(x, weight, 1e-6, residual, torch.bfloat16), leaves),
        "reference": (
            lambda: reference.rms_norm(x, weight, 1e-6, residual, torch.bfloat16),
            leaves,
        ),
        "torch.compile": (lambda: compiled(*leaves), leaves),
    }
    size = z.N * z.D
    yield from _pair("rms_norm", ops, (12.0 * size, 0), (28.0 * size, 0))


def _rotary(z: Sizes, device: torch.device) -> Iterator[Case]:
    q = _leaf(z.B, z.S, z.H, z.K, device=device)
    k = _leaf(z.B, z.S, z.G, z.K, device=device)
    angle = torch.rand(z.S, z.K // 2, device=device)
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((low * c - high * s, high * c + low * s), dim=-1).bfloat16()

    compiled = torch.compile(lambda q, k: (turn(q), turn(k)))
    ops: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
        "fused": (lambda: fused.rotary(q, k, cos, sin), (q, k)),
        "reference": (lambda: reference.rotary(q, k, cos, sin), (q, k)),
        "torch.compile": (lambda: compiled(q, k), (q, k)),
    }
    traffic = 4.0 * z.N * (z.H + z.G) * z.K
    yield from _pair("rotary", ops, (traffic, 0), (2 * traffic, 0))


def _swiglu(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = _leaf(z.N, 4 * z.D, device=device)

    def plain(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).bfloat16()

    compiled = torch.compile(plain)
    ops: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
        "fused": (lambda: fused.swiglu(x), (x,)),
        "reference": (lambda: reference.swiglu(x), (x,)),
        "torch.compile": (lambda: compiled(x), (x,)),
    }
    size = z.N * 2 * z.D
    yield from _pair("swiglu", ops, (6.0 * size, 0), (16.0 * size, 0))
