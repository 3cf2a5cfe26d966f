"""Kernels on elements past 2^31: the same bits as on a copy of what matters, close by.

Either strides reach that far, through views of a large buffer, or the tensors themselves are that
large. A card without room for a case skips it. In a dry run the offsets are small.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.device_check.journal import Skipped
from bench.device_check.rule import numerics, same_bits
from fastbrain.kernels import AdamScalars, fused, reference

Result = Iterable[tuple[Tensor, Tensor]]

_ALONG = ("sequences", "heads", "positions")


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    device = torch.device("cpu" if dry else "cuda")
    reach = 2**10 if dry else 2**31
    where = "2^10" if dry else "2^31"
    # bytes of one case over those of `reach` BF16 elements, generously
    table: list[tuple[str, float, Callable[[int, torch.device], Result]]] = [
        *(
            (f"attention, {name} through far {along}", 1.1, partial(_attention_view, name, along))
            for name, along in (zip("qkv", _ALONG, strict=True) if dry else product("qkv", _ALONG))
        ),
        ("attention, all of it", 5.0, _attention_whole),
        ("masked_cross_entropy, far rows", 1.1, _loss_view),
        ("masked_cross_entropy, all logits", 2.1, _loss_whole),
        ("linear_cross_entropy, far rows", 1.1, _head_view),
        ("experts, far tokens", 1.1, _experts_view),
        ("grouped_matmul, far weights", 1.1, _grouped_view),
        ("grouped_matmul, all weights and gradients", 4.5, _grouped_whole),
        ("swiglu, far rows", 1.1, _swiglu_view),
        ("swiglu, all rows", 3.2, _swiglu_whole),
        ("rms_norm, far rows", 1.1, _norm_view),
        ("rms_norm, all rows", 4.2, _norm_whole),
        ("rotary, far positions", 1.1, _rotary_view),
        ("rotary, all positions", 4.5, _rotary_whole),
        ("grad_norm, one large tensor", 1.1, _norm_of_large),
        ("adam_step, one large tensor", 9.2, _adam_large),
    ]
    for name, share, check in table:
        yield f"past {where}: {name}", partial(_in_room, share, check, reach, device)


def _in_room(
    share: float, check: Callable[[int, torch.device], Result], reach: int, device: torch.device
) -> dict[str, Any]:
    needed = int(2 * share * reach) + 2**29
    if device.type == "cuda" and (free := torch.cuda.mem_get_info()[0]) < needed:
        raise Skipped(
            f"needs {needed / 2**30:.1f} GiB of the card, of which {free / 2**30:.1f} is free"
        )
    torch.manual_seed(0)
    for place, (ours, theirs) in enumerate(check(reach, device)):
        assert same_bits(ours, theirs), f"result {place} has other bits far away than close by"
    return {}


def _randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _far(x: Tensor, reach: int, *strides: int) -> Tensor:
    """A copy of x whose last element lies `reach` elements or more behind its first."""
    strides = (*strides, 1)
    last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    assert last >= reach
    memory = torch.zeros(last + 1, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides).copy_(x)


def _tail(count: int, rows: Tensor) -> Tensor:
    """As many zero rows as there are more of, then these."""
    large = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    large[-len(rows) :] = rows
    return large


def _run(
    op: Callable[..., Any], leaves: Iterable[Tensor], incoming: Iterable[Tensor] | None = None
) -> list[Tensor]:
    """Outputs and gradients, those coming in being ones unless given."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    outs = op(*leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    wanted = [out for out in outs if out.requires_grad]
    given = [torch.ones_like(out) for out in wanted] if incoming is None else list(incoming)
    return [*wanted, *torch.autograd.grad(wanted, leaves, given)]


def _alike(op: Callable[..., Any], near: list[Tensor], far: list[Tensor]) -> Result:
    return zip(_run(op, far), _run(op, near), strict=True)


def _attention_view(name: str, along: str, reach: int, device: torch.device) -> Result:
    K = 64 if reach == 2**31 else 16
    shape, strides = {
        "sequences": ((3, 2, 2, K), (reach // 2 + 16, 2 * K, K)),
        "heads": ((1, 2, 3, K), (2 * K, K, reach // 2 + 16)),
        "positions": ((1, 130, 1, K), (K, reach // 128 + 16, K)),
    }[along]
    near = {n: _randn(device, *shape) for n in "qkv"}
    moved = near | {name: _far(near[name], reach, *strides)}
    return _alike(fused.causal_attention, list(near.values()), list(moved.values()))


def _attention_whole(reach: int, device: torch.device) -> Result:
    S, H, K = (128, 16, 64) if reach == 2**31 else (16, 2, 16)
    B = reach // (S * H * K) + 1
    near = [_randn(device, 1, S, heads, K) for heads in (H, 1, 1)]
    large = [_tail(B, x) for x in near]
    dout = _randn(device, 1, S, H, K)
    ours = _run(fused.causal_attention, large, [_tail(B, dout)])
    theirs = _run(fused.causal_attention, near, [dout])
    return ((a[-1:], b) for a, b in zip(ours, theirs, strict=True))


def _loss_view(reach: int, device: torch.device) -> Result:
    V = 32_000 if reach == 2**31 else 48
    logits = _randn(device, 3, V)
    targets = torch.tensor([1, 5, 7], device=device)
    mask = torch.ones(3, dtype=torch.bool, device=device)

    def op(x: Tensor) -> Tensor:
        return fused.masked_cross_entropy(x, targets, mask)[0]

    return _alike(op, [logits], [_far(logits, reach, reach // 2)])


def _loss_whole(reach: int, device: torch.device) -> Result:
    V = 32_000 if reach == 2**31 else 48
    near = _randn(device, 8, V)
    N = reach // V + 8
    targets, mask = torch.randint(V, (8,), device=device), torch.ones_like(near[:, 0]).bool()

    def loss_of(targets: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: fused.masked_cross_entropy(x, targets, mask)[0]

    ours = _run(loss_of(_tail(N, targets), _tail(N, mask)), [_tail(N, near)])
    theirs = _run(loss_of(targets, mask), [near])
    exact = reference.masked_cross_entropy(near.double(), targets, mask)[0]
    # of more rows the sum has another order
    numerics.assert_accurate(ours[0], theirs[0], exact, torch.float32, name="loss")
    return [(ours[1][-8:], theirs[1])]


def _head_view(reach: int, device: torch.device) -> Result:
    D, V = (1024, 32_000) if reach == 2**31 else (24, 48)
    hidden, weight = _randn(device, 3, D), _randn(device, V, D) / D**0.5
    targets = torch.tensor([1, 5, 7], device=device)
    mask = torch.ones(3, dtype=torch.bool, device=device)

    def op(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused.linear_cross_entropy(hidden, weight, targets, mask)[0]

    return _alike(op, [hidden, weight], [_far(hidden, reach, reach // 2), weight])


def _experts_view(reach: int, device: torch.device) -> Result:
    D, F = (1024, 512) if reach == 2**31 else (24, 16)
    x, gates = _randn(device, 3, D), torch.rand(3, 2, device=device)
    weights = [_randn(device, 4, 2 * F, D) / D**0.5, _randn(device, 4, D, F) / F**0.5]
    ids = torch.tensor([[-1, -1], [-1, 0], [1, 2]], device=device)

    def op(x: Tensor, gate_up: Tensor, down: Tensor, gates: Tensor) -> Tensor:
        return fused.expert_ffn(x, gate_up, down, ids, gates)

    moved = _far(x, reach, reach // 2)
    return _alike(op, [x, *weights, gates], [moved, *weights, gates])


def _grouped_view(reach: int, device: torch.device) -> Result:
    C, D = (128, 256) if reach == 2**31 else (5, 8)
    x, w = _randn(device, 6, D), _randn(device, 3, C, D)
    offsets = torch.tensor([0, 1, 3, 6], dtype=torch.int32, device=device)

    def op(x: Tensor, w: Tensor) -> Tensor:
        return fused.grouped_matmul(x, w, offsets)

    return _alike(op, [x, w], [x, _far(w, reach, reach // 2, D)])


def _grouped_whole(reach: int, device: torch.device) -> Result:
    """The third of three weights begins where two of them end, past the reach."""
    side = 2 ** math.ceil(math.log2(reach / 2) / 2)
    x, w = _randn(device, 8, side), _randn(device, 1, side, side)
    bounds = {n: torch.tensor([0] * n + [8], dtype=torch.int32, device=device) for n in (1, 3)}

    def op(x: Tensor, w: Tensor) -> Tensor:
        return fused.grouped_matmul(x, w, bounds[len(w)])

    ours, theirs = _run(op, [x, _tail(3, w)]), _run(op, [x, w])
    return zip([*ours[:2], ours[2][-1:]], theirs, strict=True)


def _swiglu_view(reach: int, device: torch.device) -> Result:
    near = _randn(device, 3, 4096 if reach == 2**31 else 40)
    return _alike(fused.swiglu, [near], [_far(near, reach, reach // 2)])


def _swiglu_whole(reach: int, device: torch.device) -> Result:
    near = _randn(device, 8, 4096 if reach == 2**31 else 40)
    return _rows_alike(fused.swiglu, near, reach)


def _rows_alike(op: Callable[..., Any], near: Tensor, reach: int) -> Result:
    """The last rows of a tensor past the reach, and these rows alone."""
    N = reach // near.shape[1] + len(near)
    dy = torch.randn_like(op(near))
    ours, theirs = _run(op, [_tail(N, near)], [_tail(N, dy)]), _run(op, [near], [dy])
    return ((a[-len(near) :], b) for a, b in zip(ours, theirs, strict=True))


def _norm_view(reach: int, device: torch.device) -> Result:
    D = 1024 if reach == 2**31 else 40
    near, residual = _randn(device, 3, D), torch.randn(3, D, device=device)
    weight = torch.rand(D, device=device)

    def op(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused.rms_norm(x, weight, 1e-6, residual)

    moved = _far(near, reach, reach // 2)
    return _alike(op, [near, residual, weight], [moved, residual, weight])


def _norm_whole(reach: int, device: torch.device) -> Result:
    D = 1024 if reach == 2**31 else 40
    weight = torch.rand(D, device=device)
    return _rows_alike(lambda x: fused.rms_norm(x, weight, 1e-6)[0], _randn(device, 8, D), reach)


def _tables(positions: int, K: int, device: torch.device) -> list[Tensor]:
    angles = torch.rand(positions, K // 2, device=device)
    return [angles.cos(), angles.sin()]


def _rotary_view(reach: int, device: torch.device) -> Result:
    K = 64 if reach == 2**31 else 16
    q, k = _randn(device, 1, 130, 2, K), _randn(device, 1, 130, 1, K)
    tables = _tables(130, K, device)
    moved = _far(q, reach, K, reach // 128 + 2 * K, K)
    return _alike(lambda q, k: fused.rotary(q, k, *tables), [q, k], [moved, k])


def _rotary_whole(reach: int, device: torch.device) -> Result:
    S, H, K = (1024, 16, 64) if reach == 2**31 else (16, 2, 16)
    B = reach // (S * H * K) + 1
    tables = _tables(S, K, device)
    near = [_randn(device, 1, S, heads, K) for heads in (H, 1)]
    dout = [_randn(device, *x.shape) for x in near]

    def op(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = fused.rotary(q, k, *tables)
        return out

    ours = _run(op, [_tail(B, x) for x in near], [_tail(B, d) for d in dout])
    theirs = _run(op, near, dout)
    return ((a[-1:], b) for a, b in zip(ours, theirs, strict=True))


def _norm_of_large(reach: int, device: torch.device) -> Result:
    near = _randn(device, 5000)
    ours = fused.grad_norm([_tail(reach + 5000, near)])
    exact = near.double().square().sum().sqrt()
    numerics.assert_accurate(ours, exact.float(), exact, torch.float32, name="norm")
    return []


def _adam_large(reach: int, device: torch.device) -> Result:
    near = [torch.rand(5000, device=device) for _ in range(4)]
    near.append(torch.zeros(5000, device=device, dtype=torch.bfloat16))
    large = [_tail(reach + 5000, x) for x in near]
    for tensors in (large, near):
        scalars = AdamScalars(
            *(torch.tensor(x, device=device) for x in (1e-3, 1.0, 1.0)),
            torch.tensor(0, device=device),
            torch.tensor(0, dtype=torch.int32, device=device),
        )
        lists = [[x] for x in tensors]
        settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decays": [0.1]}
        fused.adam_step(*lists, scalars, **settings)
    return ((a[-5000:], b) for a, b in zip(large, near, strict=True))
