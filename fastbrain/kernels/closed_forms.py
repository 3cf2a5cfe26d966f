"""What every launch has to do, from its shapes alone: the yardstick of the report.

Shape letters are in the kernels' own files.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastbrain.kernels.launch import Launch

Loads = Callable[[int, int], list[int]]  # rows and experts to the rows of each expert


class Work(NamedTuple):
    """A launch, counted.

    Attributes:
        ctas: for each CTA that has something to do, in the order of their start, how often it
            runs through each loop; loops in the order of the code.
        bytes: that cross the memory bus at least.
        products: M, N and K of each matrix product in one run through a loop; all loops of a kernel
            have the same.
        bodies: how many copies of that the code has.
        bulk: what one run through a loop (where there is none, one CTA) reads of large tensors, as
            (elements, bytes of one).
        vector: the most bytes that the alignment of its rows lets a thread read at a time.
        fixed: what the rest of a CTA costs, in runs through the first loop; as simulated, if None.
        streams: whether nothing but the bytes should limit it.
    """

    ctas: Sequence[tuple[float, ...]]
    bytes: float
    products: tuple[tuple[int, int, int], ...] = ()
    bodies: int = 1
    bulk: tuple[tuple[int, int], ...] = ()
    vector: int = 16
    fixed: float | None = None
    streams: bool = False

    @property
    def flops(self) -> float:
        """Executed, the part of a tile that is masked included."""
        each = sum(2 * m * n * k for m, n, k in self.products)
        return each * sum(sum(runs) for runs in self.ctas)


class Call:
    """A launch's arguments by name."""

    def __init__(self, launch: Launch) -> None:
        given = zip(launch.kernel.arg_names, launch.args, strict=False)
        self.values: dict[str, Any] = dict(given) | launch.options
        self.grid = launch.grid

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    @property
    def num_ctas(self) -> int:
        return math.prod(self.grid)

    @property
    def block(self) -> int:
        """Elements of a CTA's block."""
        return math.prod(v for name, v in self.values.items() if name.startswith(("ROWS", "BLOCK")))

    @property
    def bytes(self) -> int:
        """Of all tensors, each once."""
        tensors = [x for x in self.values.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


def name_of(launch: Launch) -> str:
    """The kernel's file and function, such as attention.fwd."""
    function = launch.kernel.fn
    kernel = function.__name__.removeprefix("_").removesuffix("_kernel")
    return f"{function.__module__.rpartition('.')[2]}.{kernel}"


def balanced(rows: int, experts: int) -> list[int]:
    return [rows // experts + (e < rows % experts) for e in range(experts)]


def skewed(rows: int, experts: int) -> list[int]:
    """The first expert gets three times the rows of the last, the others something between."""
    shares = [3 - 2 * e / max(experts - 1, 1) for e in range(experts)]
    loads = [int(rows * share / sum(shares)) for share in shares]
    return [loads[0] + rows - sum(loads), *loads[1:]]


def alone(rows: int, experts: int) -> list[int]:
    """All rows are one expert's, as in a plain product."""
    return [rows] + [0] * (experts - 1)


def work_of(launch: Launch, loads: Loads = balanced) -> Work:
    """The work of a launch; routed rows spread over the experts as `loads` has it."""
    call = Call(launch)
    name = name_of(launch)
    if name in _ROUTED:
        return _ROUTED[name](call, loads)
    if name in _FORMS:
        return _FORMS[name](call)
    return Work([()] * call.num_ctas, call.bytes)


def _attention_fwd(call: Call) -> Work:
    i, j, width = call.BLOCK_I, call.BLOCK_J, call.WIDTH
    return Work(
        _triangle(call, i, j),
        call.bytes,
        products=((i, j, width), (i, width, j)),
        bodies=2,
        bulk=((2 * j * width, call.q_ptr.element_size()),),
        fixed=0.6,
    )


def _attention_dq(call: Call) -> Work:
    i, j, width = call.BLOCK_I, call.BLOCK_J, call.WIDTH
    return Work(
        _triangle(call, i, j),
        call.bytes,
        products=((i, j, width), (i, j, width), (i, width, j)),
        bodies=2,
        bulk=((2 * j * width, call.q_ptr.element_size()),),
        fixed=0.6,
    )


def _triangle(call: Call, i: int, j: int) -> list[tuple[float, ...]]:
    """Whole key tiles and those on the diagonal of every query block; late blocks start first."""
    heads, blocks = call.grid
    return [
        (float(-(-block * i // j)), float(-(-i // j)))
        for block in reversed(range(blocks))
        for _ in range(heads)
    ]


def _attention_dkv(call: Call) -> Work:
    i, j, width = call.BLOCK_I, call.BLOCK_J, call.WIDTH
    groups, blocks = call.grid
    shared = call.q_ptr.shape[2] // call.k_ptr.shape[2]
    length = call.q_ptr.shape[1]
    ctas = [
        (shared * max(0.0, -(-(length - (block + 1) * j) // i)), shared * -(-j // i))
        for block in range(blocks)
        for _ in range(groups)
    ]
    return Work(
        ctas,
        call.bytes,
        products=((j, i, width), (j, width, i), (j, i, width), (j, width, i)),
        bodies=2,
        bulk=((2 * i * width, call.q_ptr.element_size()),),
        fixed=0.6,
    )


def _hidden(call: Call, loads: Loads) -> Work:
    m, f, d = call.BLOCK_M, call.BLOCK_F, call.BLOCK_D
    rows = loads(call.hidden_ptr.shape[0], call.E)
    return Work(
        _row_blocks(rows, m, call.F, f, call.D, d),
        call.bytes,
        products=((m, f, d), (m, f, d)),
        bulk=((m * d, call.x_ptr.element_size()), (2 * f * d, call.x_ptr.element_size())),
    )


def _hidden_grad(call: Call, loads: Loads) -> Work:
    m, f, d = call.BLOCK_M, call.BLOCK_F, call.BLOCK_D
    rows = loads(call.num_rows, call.E)
    size = call.dy_ptr.element_size()
    return Work(
        _row_blocks(rows, m, call.F, f, call.D, d),
        call.bytes,
        products=((m, f, d),),
        bulk=((m * d, size), (f * d, size)),
    )


def _rows(call: Call, loads: Loads) -> Work:
    m, c, d = call.BLOCK_M, call.BLOCK_C, call.BLOCK_D
    rows = loads(call.x_ptr.shape[0], call.E)
    size = call.x_ptr.element_size()
    return Work(
        _row_blocks(rows, m, call.C, c, call.D, d),
        call.bytes,
        products=((m, c, d),),
        bulk=((m * d, size), (c * d, size)),
    )


def _row_blocks(
    rows: list[int], m: int, columns: int, block: int, depth: int, step: int
) -> list[tuple[float, ...]]:
    """Equal CTAs, as many as there are blocks of rows of an expert times blocks of columns."""
    count = sum(-(-r // m) for r in rows) * -(-columns // block)
    return [(float(-(-depth // step)),)] * count


def _weights(call: Call, loads: Loads) -> Work:
    c, d, m = call.BLOCK_C, call.BLOCK_D, call.BLOCK_M
    blocks = -(-call.C // c) * -(-call.D // d)
    rows = loads(call.num_rows, call.offsets_ptr.shape[0] - 1)
    size = call.x_ptr.element_size()
    return Work(
        [(float(-(-r // m)),) for r in rows for _ in range(blocks)],
        call.bytes,
        products=((c, d, m),),
        bulk=((c * m, size), (d * m, size)),
    )


def _blocks(*tensors: str) -> Callable[[Call], Work]:
    """CTAs that read a block of each of these tensors."""

    def form(call: Call) -> Work:
        bulk = tuple((call.block, call.values[name].element_size()) for name in tensors)
        return Work([()] * call.num_ctas, call.bytes, bulk=bulk, streams=True)

    return form


def _adam_step(call: Call) -> Work:
    elements = call.num_ctas * call.block
    # parameter, gradient and moments in FP32, all but the gradient written, and a BF16 shadow
    return Work([()] * call.num_ctas, 30 * elements, bulk=((4 * call.block, 4),), streams=True)


def _squares(call: Call) -> Work:
    elements = call.num_ctas * call.block
    return Work([()] * call.num_ctas, 4 * elements, bulk=((call.block, 4),), streams=True)


def _rows_of_logits(call: Call) -> Work:
    """CTAs that pass over a row of logits once, or twice and write it."""
    # rows of a chunk's logits fill their stride
    columns = call.values.get("columns", call.stride) * call.VECTOR
    size = call.logits_ptr.element_size()
    gradient = call.values.get("GRADIENT", False)
    passes = 2 if gradient else 1
    # a row is in no cache any more when it is read again: as many rows as CTAs are under way
    traffic = 2 * columns * call.num_ctas * size if gradient else 0
    start = columns * size | call.stride * call.VECTOR * size
    return Work(
        [(float(-(-columns // call.block)),) * passes] * call.num_ctas,
        call.bytes + traffic,
        bulk=((call.block, size),),
        vector=min(16, start & -start),
        streams=True,
    )


def _gather(call: Call) -> Work:
    size = call.x_ptr.element_size()
    moved = 2 * call.table_ptr.shape[0] * call.D * size
    return Work([()] * call.num_ctas, moved, bulk=((call.block, size),), streams=True)


def _norm_fwd(call: Call) -> Work:
    read = [x for x in (call.x_ptr, call.residual_ptr) if x is not None]
    return Work(
        [()] * call.num_ctas,
        call.bytes,
        bulk=tuple((call.block, x.element_size()) for x in read),
        streams=True,
    )


def _norm_bwd(call: Call) -> Work:
    read = [x for x in (call.dy_ptr, call.h_ptr, call.dnew_ptr) if x is not None]
    rounds = -(-call.N // (call.num_ctas * call.ROWS))
    return Work(
        [(float(rounds),)] * call.num_ctas,
        call.bytes,
        bulk=tuple((call.block, x.element_size()) for x in read),
        streams=True,
    )


def _turn(call: Call) -> Work:
    return Work(
        [()] * call.num_ctas,
        call.bytes,
        bulk=((2 * call.block, call.q_ptr.element_size()),),
        streams=True,
    )


def _tokens(call: Call) -> Work:
    size = call.y_ptr.element_size()
    bulk = ((call.block, size),) * call.CHOICES
    return Work([()] * call.num_ctas, call.bytes, bulk=bulk, streams=True)


_ROUTED: dict[str, Callable[[Call, Loads], Work]] = {
    "experts.hidden": _hidden,
    "experts.hidden_grad": _hidden_grad,
    "grouped_gemm.rows": _rows,
    "grouped_gemm.weights": _weights,
}
_FORMS: dict[str, Callable[[Call], Work]] = {
    "attention.fwd": _attention_fwd,
    "attention.bwd_dq": _attention_dq,
    "attention.bwd_dkv": _attention_dkv,
    "activation.fwd": _blocks("gate_up_ptr", "gate_up_ptr"),
    "activation.bwd": _blocks("gate_up_ptr", "gate_up_ptr", "dy_ptr"),
    "adam.step": _adam_step,
    "adam.squares": _squares,
    "chunked_head.gather": _gather,
    "chunked_head.row": _rows_of_logits,
    "cross_entropy.fwd": _rows_of_logits,
    "cross_entropy.bwd": _rows_of_logits,
    "experts.tokens": _tokens,
    "norm.fwd": _norm_fwd,
    "norm.bwd": _norm_bwd,
    "rope.turn": _turn,
}
