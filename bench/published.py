"""What the reference crate has published of its speed on an RTX 3060, typed.

`published.toml` holds the figures and their sources; nothing there was measured by us. Rates,
step times and peaks are the crate's; what is derived from them here says so.
"""

import tomllib
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastbrain.config import TransformerConfig

FILE = Path(__file__).with_name("published.toml")
TOKENS = 50e9  # what the column of days is for


def days(tokens_per_s: float) -> float:
    """Days that 50B tokens take."""
    return TOKENS / tokens_per_s / 86_400


class Range(NamedTuple):
    """Lowest and highest of the figures quoted; equal where there is one."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class PeakMib(NamedTuple):
    """MiB of the allocator's high-water mark, weights and optimizer included.

    Attributes:
        kept: every activation is kept for the backward pass.
        checkpointed: every block is computed again in it.
    """

    kept: float | None = None
    checkpointed: float | None = None


_NO_PEAK = PeakMib()


@dataclass(frozen=True)
class Printed:
    """Columns that the source prints beside its rate, to check our reading of it against.

    Attributes:
        total_m: parameters in all, in millions.
        active_m: parameters that a token touches, in millions.
        formula_fits: whether the rate gives `tflops` and `mfu_percent` by the others' formula.
    """

    total_m: float | None = None
    active_m: float | None = None
    tflops: float | None = None
    mfu_percent: float | None = None
    days_50b: float | None = None
    contended_ratio: float | None = None
    formula_fits: bool = True


@dataclass(frozen=True)
class Peers:
    """Tokens/s of other frameworks in the same comparison.

    Attributes:
        pytorch_valid: false where its whole model was cast to FP16 and its loss was not a number.
    """

    tensorflow: float | None = None
    pytorch: float | None = None
    pytorch_valid: bool = True


@dataclass(frozen=True)
class StepRow:
    """A training step: a model, a batch, and what the crate says of its speed and memory.

    Attributes:
        id: names the row, uniquely.
        table: which of the source's tables it stands in.
        model: names the model.
        tokens_per_s: as printed, else derived from `step_ms`; None where only memory or only a
            contended rate is published.
        step_ms: as printed, else derived from `tokens_per_s`.
        peak_mib: of the crate's memory pool.
        checkpointed_ms: a step with every block checkpointed.
        contended_tokens_per_s: while another program used the GPU.
        device_peak_mib: of the whole device, `desktop_mib` included.
        kernels_ms: the sum of the step's kernels.
        generation: "unfused" for the crate before flash attention and BF16 activations, "2.0" and
            "4.0" for those versions as released, and what had been reached in between.
    """

    id: str
    table: str
    model: str
    config: TransformerConfig
    batch: int
    seq: int
    generation: str
    source: str
    tokens_per_s: Range | None = None
    step_ms: Range | None = None
    peak_mib: PeakMib = _NO_PEAK
    checkpointed_ms: Range | None = None
    contended_tokens_per_s: Range | None = None
    device_peak_mib: float | None = None
    desktop_mib: float | None = None
    kernels_ms: Range | None = None
    printed: Printed = Printed()
    peers: Peers = Peers()
    note: str = ""

    @property
    def tokens(self) -> int:
        """Tokens in a batch, the ones without a target included."""
        return self.batch * self.seq

    @property
    def days(self) -> float | None:
        """Days for 50B tokens at the middle of `tokens_per_s`, derived."""
        return None if self.tokens_per_s is None else days(self.tokens_per_s.middle)


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or a group of them, in one training step.

    Attributes:
        ms: milliseconds of the step, all launches together.
        share_percent: of the step's kernels, where it is published.
        part_of: the name of a group in the same list that already counts it.
    """

    name: str
    ms: float
    launches: int | None = None
    share_percent: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    part_of: str = ""
    note: str = ""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of one step; `rows` need not add up to `kernels_ms`.

    Attributes:
        kernels_ms: the sum of all kernels of the step.
        step_ms: the step by the clock.
    """

    table: str
    model: str
    config: TransformerConfig
    batch: int
    seq: int
    generation: str
    source: str
    rows: tuple[KernelRow, ...]
    kernels_ms: Range | None = None
    step_ms: Range | None = None
    note: str = ""


class Card(NamedTuple):
    """The machine that every figure is of.

    Attributes:
        tensor_tflops: the peak that the source divides by for its MFU.
    """

    name: str
    tensor_tflops: float
    machine: str


class Contention(NamedTuple):
    """What else ran on the card when the contended rates were taken.

    Attributes:
        other_job_percent: of the GPU's time, as its driver counts it.
        out_of_memory_shapes: how many shapes failed for want of memory.
    """

    other_job_mib: int
    other_job_percent: int
    out_of_memory_shapes: int
    note: str


def card() -> Card:
    return Card(**_document()["card"])


def contention() -> Contention:
    return Contention(**_document()["contention"])


@cache
def step_rows() -> tuple[StepRow, ...]:
    """Every published training step, in the order of the source's tables."""
    return tuple(_step(dict(entry)) for entry in _document()["steps"])


@cache
def kernel_tables() -> tuple[KernelTable, ...]:
    """Every published list of a step's kernels."""
    return tuple(_kernels(dict(entry)) for entry in _document()["kernels"])


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def _step(entry: dict[str, Any]) -> StepRow:
    _common(entry)
    for name in ("tokens_per_s", "checkpointed_ms", "contended_tokens_per_s"):
        if name in entry:
            entry[name] = Range(*entry[name])
    tokens = entry["batch"] * entry["seq"]
    rate, ms = entry.get("tokens_per_s"), entry.get("step_ms")
    if rate is None and ms is not None:
        entry["tokens_per_s"] = Range(tokens / ms.high * 1e3, tokens / ms.low * 1e3)
    elif rate is not None and ms is None:
        entry["step_ms"] = Range(tokens / rate.high * 1e3, tokens / rate.low * 1e3)
    entry["peak_mib"] = PeakMib(**entry.get("peak_mib", {}))
    entry["printed"] = Printed(**_take(entry, fields(Printed)))
    entry["peers"] = Peers(**_take(entry, fields(Peers)))
    return StepRow(**entry)


def _kernels(entry: dict[str, Any]) -> KernelTable:
    _common(entry)
    entry["rows"] = tuple(KernelRow(**row) for row in entry["rows"])
    return KernelTable(**entry)


def _common(entry: dict[str, Any]) -> None:
    entry["config"] = _config(entry["model"])
    for name in ("kernels_ms", "step_ms"):
        if name in entry:
            entry[name] = Range(*entry[name])


def _take(entry: dict[str, Any], wanted: tuple[Field[Any], ...]) -> dict[str, Any]:
    """Move the wanted fields out of `entry`."""
    return {f.name: entry.pop(f.name) for f in wanted if f.name in entry}


@cache
def _config(model: str) -> TransformerConfig:
    shape = dict(_document()["models"][model])
    start = shape.pop("moe_from_layer", shape["n_layers"])
    return TransformerConfig(moe_layers=tuple(range(start, shape["n_layers"])), **shape)
