"""The launches that the package ships: every operation at the shapes of real models.

Shape letters are in `fastbrain.config`. Three models stand for what is trained: the one of the
course's chapter on long runs, the builder's default, and the dense one whose times are published.
What else a user may ask for (other head widths, packed documents) is listed at small shapes, since
it is only to be compiled.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastbrain.kernels import fused
from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.launch import Launch, recorded
from fastbrain.kernels.tiles import HEAD_WIDTHS


class Model(NamedTuple):
    """The shape of a model and of the batch it is trained on."""

    name: str
    B: int
    S: int
    D: int
    H: int
    G: int
    K: int
    V: int
    layers: int
    d_ff: int
    moe_layers: int = 0
    moe_d_ff: int = 0
    E: int = 0
    top_k: int = 0


CHAPTER = Model("chapter", 8, 1024, 1024, 16, 4, 64, 32000, 20, 2816, 15, 512, 8, 2)
DEFAULT = Model("default", 4, 1024, 512, 8, 2, 64, 32000, 8, 1408, 6, 352, 8, 2)
DENSE = Model("dense", 4, 1024, 768, 12, 4, 64, 32004, 16, 1408)
MODELS = (CHAPTER, DEFAULT, DENSE)
DTYPES = (torch.bfloat16, torch.float32)
# a plain product has no kernel of our own, and AdamScalars is a type
OPERATIONS = tuple(name for name in fused.__all__ if name not in ("linear", "AdamScalars"))


class Case(NamedTuple):
    """One launch of an operation, and where it comes from.

    Attributes:
        operation: the function of the facade.
        shape: the model, or what else decides the shapes.
        dtype: of the activations.
        production: whether one of the models makes it.
        launch: as recorded.
        model: whose shapes they are; None where no model has them.
    """

    operation: str
    shape: str
    dtype: torch.dtype
    launch: Launch
    model: Model | None

    @property
    def production(self) -> bool:
        return self.model is not None


class Choice(NamedTuple):
    """The launches that are asked for; an empty collection stands for all."""

    operations: Collection[str] = ()
    shapes: Collection[str] = ()
    dtypes: Collection[torch.dtype] = ()

    def takes(self, case: Case) -> bool:
        operations = not self.operations or case.operation in self.operations
        return operations and self.covers(case.shape, case.dtype)

    def covers(self, shape: str, dtype: torch.dtype) -> bool:
        shapes = not self.shapes or shape in self.shapes
        return shapes and (not self.dtypes or dtype in self.dtypes)


_ALL = Choice()


def shapes() -> list[str]:
    """What a case's shape may be."""
    others = [shape for shape, _ in _others(DTYPES[0])]
    return list(dict.fromkeys([*(model.name for model in MODELS), *others]))


def cases(family: str, choice: Choice = _ALL) -> list[Case]:
    """The launches of a card family, those of the models first, in a fixed order."""
    found = []
    for model in MODELS:
        for dtype in DTYPES:
            if choice.covers(model.name, dtype):
                found += _record(family, model.name, dtype, model, _of_model(model, dtype))
    for dtype in DTYPES:
        for shape, calls in _others(dtype):
            if choice.covers(shape, dtype):
                found += _record(family, shape, dtype, None, calls)
    return [case for case in found if choice.takes(case)]


# an operation by name, and the tensors it returns that backward is to start from
_Call = tuple[str, Tensor | None]


def _record(
    family: str, shape: str, dtype: torch.dtype, model: Model | None, calls: Iterator[_Call]
) -> list[Case]:
    found: list[Case] = []
    with recorded(family) as launches:
        for operation, out in calls:
            if out is not None:
                out.sum().backward()
            found += [Case(operation, shape, dtype, launch, model) for launch in launches]
            launches.clear()
    return found


def _of_model(model: Model, dtype: torch.dtype) -> Iterator[_Call]:
    """What a training step launches, in the order that balances the compilation of it best."""
    B, S, D, H, G, K, V = model[1:8]
    N = B * S
    turned = (_meta(B, S, heads, K, dtype=dtype) for heads in (H, G))
    qkv = _meta(B, S, H + 2 * G, K, dtype=dtype)
    yield "causal_attention", fused.causal_attention(*turned, qkv[:, :, H + G :])
    if model.E:
        yield "expert_ffn", expert_ffn_of(model, dtype)
    head, shadow = _weight(V, D, dtype=dtype)
    hidden, counts = _meta(N, D, dtype=dtype), _meta(N, dtype=torch.bool)
    targets = _meta(N, dtype=torch.int64)
    yield (
        "linear_cross_entropy",
        fused.linear_cross_entropy(hidden, head, targets, counts, shadow=shadow)[0],
    )
    logits = _meta(N, V, dtype=dtype)
    yield "masked_cross_entropy", fused.masked_cross_entropy(logits, targets, counts)[0]
    # the first norm reads the embedding's rows, the others add to the FP32 stream
    stream, gain = _meta(N, D, dtype=torch.float32), _meta(D, dtype=torch.float32)
    yield "rms_norm", fused.rms_norm(stream, gain, 1e-6, None, dtype)[0]
    added = fused.rms_norm(_meta(N, D, dtype=dtype), gain, 1e-6, stream, dtype)
    yield "rms_norm", added[0].sum() + added[1].sum()
    cos, sin = (_meta(S, K // 2, dtype=torch.float32, leaf=False) for _ in range(2))
    q, k = fused.rotary(qkv[:, :, :H], qkv[:, :, H : H + G], cos, sin)
    yield "rotary", q.sum() + k.sum()
    yield "swiglu", fused.swiglu(_meta(N, 2 * model.d_ff, dtype=dtype))
    if model.E:
        yield "swiglu", fused.swiglu(_meta(N, 2 * model.moe_d_ff, dtype=dtype))
    weights = [_meta(*shape, dtype=torch.float32) for shape in _parameters(model)]
    _adam(weights, dtype)
    yield "adam_step", None
    fused.grad_norm(weights)
    yield "grad_norm", None


def _others(dtype: torch.dtype) -> Iterator[tuple[str, Iterator[_Call]]]:
    for K in HEAD_WIDTHS:
        yield f"width {K}", _attention(K, dtype, packed=False)
        yield f"width {K} packed", _attention(K, dtype, packed=True)
    yield "packed", _packed_rotary(dtype)
    yield "chapter max_rows", _bounded_loss(dtype)
    yield "chapter", _grouped(dtype)
    yield "chapter evaluation", _evaluation(dtype)


def _attention(K: int, dtype: torch.dtype, packed: bool) -> Iterator[_Call]:
    q, k, v = (_meta(1, 1024, heads, K, dtype=dtype) for heads in (4, 2, 2))
    segments = _meta(1, 1024, dtype=torch.int32) if packed else None
    yield "causal_attention", fused.causal_attention(q, k, v, segments=segments)


def _packed_rotary(dtype: torch.dtype) -> Iterator[_Call]:
    qkv = _meta(1, 1024, 8, 64, dtype=dtype)
    cos, sin = (_meta(1024, 32, dtype=torch.float32, leaf=False) for _ in range(2))
    positions = _meta(1, 1024, dtype=torch.int32)
    q, k = fused.rotary(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin, positions=positions)
    yield "rotary", q.sum() + k.sum()


def _bounded_loss(dtype: torch.dtype) -> Iterator[_Call]:
    N, D, V = CHAPTER.B * CHAPTER.S, CHAPTER.D, CHAPTER.V
    head, shadow = _weight(V, D, dtype=dtype)
    hidden, counts = _meta(N, D, dtype=dtype), _meta(N, dtype=torch.bool)
    targets = _meta(N, dtype=torch.int64)
    loss, _ = fused.linear_cross_entropy(
        hidden, head, targets, counts, max_rows=N // 4, shadow=shadow
    )
    yield "linear_cross_entropy", loss


def _grouped(dtype: torch.dtype) -> Iterator[_Call]:
    rows = CHAPTER.B * CHAPTER.S * CHAPTER.top_k
    weight, shadow = _weight(CHAPTER.E, 2 * CHAPTER.moe_d_ff, CHAPTER.D, dtype=dtype)
    offsets = _meta(CHAPTER.E + 1, dtype=torch.int32)
    x = _meta(rows, CHAPTER.D, dtype=dtype)
    yield "grouped_matmul", fused.grouped_matmul(x, weight, offsets, shadow)


def _evaluation(dtype: torch.dtype) -> Iterator[_Call]:
    """What a forward without gradients launches otherwise."""
    N, D, V = CHAPTER.B * CHAPTER.S, CHAPTER.D, CHAPTER.V
    with torch.no_grad():
        expert_ffn_of(CHAPTER, dtype)
        yield "expert_ffn", None
        head, shadow = _weight(V, D, dtype=dtype)
        targets, counts = _meta(N, dtype=torch.int64), _meta(N, dtype=torch.bool)
        fused.linear_cross_entropy(_meta(N, D, dtype=dtype), head, targets, counts, shadow=shadow)
    yield "linear_cross_entropy", None


def expert_ffn_of(model: Model, dtype: torch.dtype) -> Tensor:
    """The routed experts of a model, on tensors without data."""
    N, D, E, F = model.B * model.S, model.D, model.E, model.moe_d_ff
    gate_up, gate_up_shadow = _weight(E, 2 * F, D, dtype=dtype)
    down, down_shadow = _weight(E, D, F, dtype=dtype)
    ids = _meta(N, model.top_k, dtype=torch.int64)
    gates = _meta(N, model.top_k, dtype=torch.float32)
    both = gate_up_shadow is not None and down_shadow is not None
    shadows = (gate_up_shadow, down_shadow) if both else None
    return fused.expert_ffn(_meta(N, D, dtype=dtype), gate_up, down, ids, gates, shadows)


def _adam(weights: list[Tensor], dtype: torch.dtype) -> None:
    scalar = {"lr": torch.float32, "grad_scale": torch.float32, "clip": torch.float32}
    scalars = AdamScalars(
        **{name: torch.empty((), dtype=kind, device="meta") for name, kind in scalar.items()},
        step=torch.empty((), dtype=torch.int64, device="meta"),
        skip=torch.empty((), dtype=torch.int32, device="meta"),
    )
    shadow = torch.bfloat16 if dtype == torch.bfloat16 else None
    fused.adam_step(
        *([_meta(*w.shape, dtype=torch.float32, leaf=False) for w in weights] for _ in range(4)),
        [
            torch.empty(w.shape if shadow and w.dim() > 1 else (0,), dtype=shadow, device="meta")
            for w in weights
        ],
        scalars,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decays=[0.0] * len(weights),
    )


def _parameters(model: Model) -> Iterator[tuple[int, ...]]:
    D, F = model.D, model.moe_d_ff
    heads = model.H * model.K
    yield model.V, D
    yield (D,)
    for layer in range(model.layers):
        yield from ((D,), (D,), (heads + 2 * model.G * model.K, D), (D, heads))
        if layer < model.layers - model.moe_layers:
            yield from ((2 * model.d_ff, D), (D, model.d_ff))
        else:
            yield from ((model.E, D), (model.E, 2 * F, D), (model.E, D, F), (2 * F, D), (D, F))


def _weight(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """An FP32 master, and its shadow where activations are narrower."""
    shadow = None
    if dtype != torch.float32:
        shadow = _meta(*shape, dtype=dtype, leaf=False)
    return _meta(*shape, dtype=torch.float32), shadow


def _meta(*shape: int, dtype: torch.dtype, leaf: bool = True) -> Tensor:
    wants = leaf and dtype.is_floating_point
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=wants)
