"""Calls of every operation, as data: inputs of one size, and what either twin does with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbrain.kernels import AdamScalars

BOTH = (torch.float32, torch.bfloat16)
BF16 = (torch.bfloat16,)
FP32 = (torch.float32,)


@dataclass(frozen=True)
class Sizes:
    """Letters as in `fastbrain.config`; k choices per token.

    Attributes:
        heads: pairs of query and key-value heads and a width, beside (H, G, K).
        cut: positions or columns that are taken away where sizes are to be uneven.
    """

    B: int
    S: int
    D: int
    H: int
    G: int
    K: int
    F: int
    E: int
    k: int
    V: int
    heads: tuple[tuple[int, int, int], ...]
    cut: int

    @property
    def N(self) -> int:
        return self.B * self.S


REAL = Sizes(
    B=2, S=1024, D=1024, H=16, G=4, K=64, F=512, E=8, k=2, V=32_000,
    heads=((16, 16, 128), (16, 1, 32), (6, 2, 96), (8, 4, 16)), cut=24,
)  # fmt: skip
TOY = Sizes(
    B=1, S=33, D=24, H=2, G=1, K=32, F=16, E=4, k=2, V=48,
    heads=((2, 2, 16), (3, 1, 96)), cut=3,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call of an operation.

    Attributes:
        inputs: by name; those that want a gradient say so.
        op: of a twin, the function that takes the inputs as keywords.
        fp32: inputs that are FP32 whatever the dtype.
    """

    inputs: dict[str, Tensor]
    op: Callable[[Any], Callable[..., Any]]
    fp32: tuple[str, ...] = ()


class Listed(NamedTuple):
    """A call that is yet to be built, and the dtypes it has a meaning in."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    build: Callable[[torch.device], Call]


def listed(z: Sizes) -> list[Listed]:
    """Every operation of `fastbrain.kernels.fused`, in the ways a model calls it."""
    found = [
        Listed(f"attention {H}/{G} heads of {K}", BOTH, partial(_attention, z, H, G, K))
        for H, G, K in ((z.H, z.G, z.K), *z.heads)
    ]
    views = partial(_attention_views, z)
    table: list[tuple[str, tuple[torch.dtype, ...], Callable[[torch.device], Call]]] = [
        ("attention, views of a projection", BOTH, views),
        ("attention, packed documents", BOTH, partial(views, packed=True)),
        ("experts", BOTH, partial(_experts, z, _even_route)),
        ("experts, uneven", BOTH, partial(_experts, z, _uneven_route)),
        ("experts, odd widths", BOTH, partial(_experts, z, _uneven_route, cut=z.cut)),
        ("experts, shadows", BF16, partial(_experts, z, _even_route, shadowed=True)),
        ("grouped_matmul, uneven", BOTH, partial(_grouped, z)),
        ("linear", BOTH, partial(_linear, z)),
        ("linear, shadow", BF16, partial(_linear, z, shadowed=True)),
        ("masked_cross_entropy", BOTH, partial(_masked_loss, z)),
        ("masked_cross_entropy, odd width", BOTH, partial(_masked_loss, z, more=3)),
        ("linear_cross_entropy", BOTH, partial(_head, z)),
        ("linear_cross_entropy, packed rows", BOTH, partial(_head, z, share=0.25)),
        ("linear_cross_entropy, shadow", BF16, partial(_head, z, share=0.25, shadowed=True)),
        ("adam_step", FP32, partial(_adam, z)),
        ("adam_step, BF16 gradients", FP32, partial(_adam, z, narrow=True)),
        ("grad_norm", BOTH, partial(_grad_norm, z)),
        ("rms_norm", BOTH, partial(_rms_norm, z, residual=False)),
        ("rms_norm, residual", BOTH, partial(_rms_norm, z, residual=True)),
        ("rotary", BOTH, partial(_rotary, z)),
        ("rotary, positions and views", BOTH, partial(_rotary, z, views=True)),
        ("swiglu", BOTH, partial(_swiglu, z)),
    ]
    return found + [Listed(*row) for row in table]


def _leaf(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=device)).requires_grad_()


def _attention(z: Sizes, H: int, G: int, K: int, device: torch.device) -> Call:
    # a length that ends within a block
    S = z.S - z.cut
    q, k, v = (_leaf(device, z.B, S, heads, K) for heads in (H, G, G))
    return Call({"q": q, "k": k, "v": v}, lambda twin: twin.causal_attention)


def _attention_views(z: Sizes, device: torch.device, packed: bool = False) -> Call:
    segments = None
    if packed:
        # documents of all lengths, which start anywhere
        starts = torch.rand(z.B, z.S, device=device) < 5 / z.S
        segments = starts.cumsum(1).int()
    heads = [z.H, z.G, z.G]

    def op(twin: Any) -> Callable[..., Tensor]:
        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.unflatten(-1, (-1, z.K)).split(heads, dim=-2)
            out: Tensor = twin.causal_attention(q, k, v, segments=segments)
            return out

        return attend

    return Call({"qkv": _leaf(device, z.B, z.S, sum(heads) * z.K)}, op)


def _even_route(z: Sizes, device: torch.device) -> Tensor:
    return torch.rand(z.N, z.E, device=device).topk(z.k, dim=1).indices


def _uneven_route(z: Sizes, device: torch.device) -> Tensor:
    """Half of the choices are expert 0, none is the last one, and some are skipped."""
    ids = torch.randint(1, z.E - 1, (z.N, z.k), device=device)
    ids[torch.rand(z.N, z.k, device=device) < 0.5] = 0
    ids[torch.rand(z.N, z.k, device=device) < 0.05] = -1
    return ids


def _experts(
    z: Sizes,
    route: Callable[[Sizes, torch.device], Tensor],
    device: torch.device,
    cut: int = 0,
    shadowed: bool = False,
) -> Call:
    D, F = z.D - cut, z.F - cut
    ids = route(z, device)
    inputs = {
        "x": _leaf(device, z.N, D),
        "w_gate_up": _leaf(device, z.E, 2 * F, D, scale=D**-0.5),
        "w_down": _leaf(device, z.E, D, F, scale=F**-0.5),
        "gates": torch.rand(z.N, z.k, device=device).requires_grad_(),
    }
    if not shadowed:
        op = partial(_with, "expert_ffn", expert_ids=ids)
        return Call(inputs, op, fp32=("gates",))
    # unlike their masters, so that it shows which of the two was used
    shadows = [(3 * inputs[n].detach()).bfloat16() for n in ("w_gate_up", "w_down")]

    def with_shadows(twin: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, **others: Tensor) -> Tensor:
            used = tuple(shadow.to(x.dtype) for shadow in shadows)
            out: Tensor = twin.expert_ffn(x, **others, expert_ids=ids, shadows=used)
            return out

        return run

    return Call(inputs, with_shadows, fp32=("w_gate_up", "w_down", "gates"))


def _with(name: str, twin: Any, **given: Any) -> Callable[..., Any]:
    return partial(getattr(twin, name), **given)


def _grouped(z: Sizes, device: torch.device) -> Call:
    # half of the rows in the first group, none in the second, and some past the last
    rest = z.N // 2 - z.N // 16
    bounds = [0, z.N // 2, z.N // 2]
    bounds += [z.N // 2 + rest * i // (z.E - 2) for i in range(1, z.E - 1)]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    inputs = {"x": _leaf(device, z.N, z.D), "w": _leaf(device, z.E, z.F, z.D, scale=z.D**-0.5)}
    return Call(inputs, partial(_with, "grouped_matmul", offsets=offsets))


def _shadowed(name: str, shadow: Tensor, first: str, **given: Any) -> Callable[..., Any]:
    """A call with a shadow, in the dtype of its first input: FP64 truth has one of FP64."""

    def op(twin: Any) -> Callable[..., Any]:
        def run(**inputs: Tensor) -> Any:
            return getattr(twin, name)(**inputs, **given, shadow=shadow.to(inputs[first].dtype))

        return run

    return op


def _linear(z: Sizes, device: torch.device, shadowed: bool = False) -> Call:
    weight = _leaf(device, 2 * z.F, z.D, scale=z.D**-0.5)
    inputs = {"x": _leaf(device, z.B, z.S, z.D), "weight": weight}
    if not shadowed:
        return Call(inputs, partial(_with, "linear"))
    shadow = (3 * weight.detach()).bfloat16()
    return Call(inputs, _shadowed("linear", shadow, "x"), fp32=("weight",))


def _masked_loss(z: Sizes, device: torch.device, more: int = 0) -> Call:
    V = z.V + more
    given = {
        "targets": torch.randint(V, (z.N,), device=device),
        "mask": torch.rand(z.N, device=device) < 0.5,
    }
    inputs = {"logits": _leaf(device, z.N, V, scale=3.0)}
    return Call(inputs, partial(_with, "masked_cross_entropy", **given))


def _head(z: Sizes, device: torch.device, share: float = 1.0, shadowed: bool = False) -> Call:
    weight = _leaf(device, z.V, z.D, scale=z.D**-0.5)
    inputs = {"hidden": _leaf(device, z.N, z.D), "weight": weight}
    mask = torch.rand(z.N, device=device) < share
    given: dict[str, Any] = {
        "targets": torch.randint(z.V, (z.N,), device=device),
        "mask": mask,
        # several chunks, the last one short
        "chunk": z.N // 3,
        "max_rows": None if share == 1 else int(mask.sum()),
    }
    if not shadowed:
        return Call(inputs, partial(_with, "linear_cross_entropy", **given))
    shadow = (3 * weight.detach()).bfloat16()
    op = _shadowed("linear_cross_entropy", shadow, "hidden", **given)
    return Call(inputs, op, fp32=("weight",))


def _adam(z: Sizes, device: torch.device, narrow: bool = False) -> Call:
    shapes = [(z.D, z.D), (z.D,), (1025,), (5, 3)]
    inputs = {}
    for i, shape in enumerate(shapes):
        p, g, m, v = (torch.randn(shape, device=device) for _ in range(4))
        # parameters as small as an update, so that an error in it is no small error
        inputs |= {f"p{i}": 1e-3 * p, f"g{i}": g, f"m{i}": 0.1 * m, f"v{i}": 0.01 * v.square()}
        if narrow:
            inputs[f"g{i}"] = g.bfloat16().float()

    def op(twin: Any) -> Callable[..., tuple[Tensor, ...]]:
        def step(**given: Tensor) -> tuple[Tensor, ...]:
            numbers = range(len(shapes))
            p, g, m, v = ([given[f"{name}{i}"].clone() for i in numbers] for name in "pgmv")
            shadows = [torch.zeros_like(x, dtype=torch.bfloat16) for x in p]
            scalars = AdamScalars(
                *(torch.tensor(x, device=device) for x in (1e-3, 0.5, 0.7)),
                torch.tensor(2, device=device),
                torch.tensor(0, dtype=torch.int32, device=device),
            )
            twin.adam_step(
                p, [x.bfloat16() for x in g] if narrow else g, m, v, shadows, scalars,
                betas=(0.9, 0.95), eps=1e-8, weight_decays=[0.1, 0.0, 0.1, 0.0],
            )  # fmt: skip
            assert int(scalars.step) == 3, "the step was not counted"
            for x, shadow in zip(p, shadows, strict=True):
                assert torch.equal(x.bfloat16(), shadow), "a shadow is not its parameter rounded"
            return *p, *m, *v

        return step

    return Call(inputs, op)


def _grad_norm(z: Sizes, device: torch.device) -> Call:
    shapes = [(z.V, z.D), (z.E, 2 * z.F, z.D), (1025,), (5, 3)]
    inputs = {f"g{i}": torch.randn(shape, device=device) for i, shape in enumerate(shapes)}

    def op(twin: Any) -> Callable[..., Tensor]:
        def norm(**grads: Tensor) -> Tensor:
            out: Tensor = twin.grad_norm(list(grads.values()))
            return out

        return norm

    return Call(inputs, op)


def _rms_norm(z: Sizes, device: torch.device, residual: bool) -> Call:
    inputs = {"x": _leaf(device, z.N, z.D), "weight": _leaf(device, z.D)}
    if residual:
        inputs["residual"] = _leaf(device, z.N, z.D)
    op = partial(_with, "rms_norm", eps=1e-6)
    return Call(inputs, op, fp32=("weight", "residual"))


def _rotary(z: Sizes, device: torch.device, views: bool = False) -> Call:
    # tables that are no circle, so that any mix-up shows
    tables = {n: torch.randn(2 * z.S, z.K // 2, device=device) for n in ("cos", "sin")}
    fp32 = ("cos", "sin")
    if not views:
        q, k = (_leaf(device, z.B, z.S, heads, z.K) for heads in (z.H, z.G))
        return Call({"q": q, "k": k, **tables}, partial(_with, "rotary", offset=z.S // 2), fp32)
    positions = torch.randint(2 * z.S, (z.B, z.S), device=device)

    def op(twin: Any) -> Callable[..., Any]:
        def turn(qk: Tensor, cos: Tensor, sin: Tensor) -> Any:
            q, k = qk.unflatten(-1, (-1, z.K)).split([z.H, z.G], dim=-2)
            return twin.rotary(q, k, cos, sin, positions=positions)

        return turn

    return Call({"qk": _leaf(device, z.B, z.S, (z.H + z.G) * z.K), **tables}, op, fp32)


def _swiglu(z: Sizes, device: torch.device) -> Call:
    return Call({"gate_up": _leaf(device, z.N, 4 * z.D)}, lambda twin: twin.swiglu)
