"""What reads and writes memory and computes little, against the same under `torch.compile`."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.compiling import compiled, compiler_missing
from bench.operations.case import Case, Sizes, Ways, leaf
from fastbrain.kernels import fused, reference

_EPS = 1e-6


def rms_norm(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = leaf(z.N, z.D, device=device)
    residual = leaf(z.N, z.D, device=device, dtype=torch.float32)
    weight = leaf(z.D, device=device, dtype=torch.float32)
    leaves = (x, residual, weight)
    given = (x, weight, _EPS, residual, torch.bfloat16)
    ways = Ways()
    ways.add("fused", lambda: fused.rms_norm(*given), leaves)
    ways.add("reference", lambda: reference.rms_norm(*given), leaves)
    whole = compiled(_norm)
    ways.add("torch.compile", lambda: whole(*leaves), leaves, compiler_missing(device))
    size = z.N * z.D
    yield ways.forward("rms_norm forward", 12.0 * size, 0)
    yield ways.both("rms_norm forward+backward", 28.0 * size, 0)


def rotary(z: Sizes, device: torch.device) -> Iterator[Case]:
    q = leaf(z.B, z.S, z.H, z.K, device=device)
    k = leaf(z.B, z.S, z.G, z.K, device=device)
    angle = torch.rand(z.S, z.K // 2, device=device)
    given = (q, k, angle.cos(), angle.sin())
    ways = Ways()
    ways.add("fused", lambda: fused.rotary(*given), (q, k))
    ways.add("reference", lambda: reference.rotary(*given), (q, k))
    whole = compiled(_rotary)
    ways.add("torch.compile", lambda: whole(*given), (q, k), compiler_missing(device))
    traffic = 4.0 * z.N * (z.H + z.G) * z.K
    yield ways.forward("rotary forward", traffic, 0)
    yield ways.both("rotary forward+backward", 2 * traffic, 0)


def swiglu(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = leaf(z.N, 4 * z.D, device=device)
    ways = Ways()
    ways.add("fused", lambda: fused.swiglu(x), (x,))
    ways.add("reference", lambda: reference.swiglu(x), (x,))
    whole = compiled(_swiglu)
    ways.add("torch.compile", lambda: whole(x), (x,), compiler_missing(device))
    size = z.N * 2 * z.D
    yield ways.forward("swiglu forward", 6.0 * size, 0)
    yield ways.both("swiglu forward+backward", 16.0 * size, 0)


def _norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float() + residual
    return F.rms_norm(h, weight.shape, weight, _EPS).bfloat16(), h


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1).bfloat16()


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).bfloat16()
