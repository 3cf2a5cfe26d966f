"""What `fastbrain inspect` has found out about one path, and the words and JSON it is told in."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastbrain.config import TransformerConfig
from fastbrain.errors import FastBrainError

# more layers than any model has, and few enough to count one by one
MAX_LAYERS = 100_000

_FIRST_TENSORS = 6
_LONGEST = 160


class Unknown(FastBrainError):
    """Nothing of fastbrain's; the message says what it looks like."""


class TensorRow(NamedTuple):
    """One tensor of a file: as many numbers in `shape` as it has dimensions."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Finding:
    """What a path holds.

    Attributes:
        what: the kind of file or directory, in a phrase.
        whole: whether it is as it was written; None where nothing can tell.
        checked: what `whole` rests on.
        facts: its properties, label to value; a label is a word or two.
        tensors: of a file of tensors, in file order.
        fault: what is wrong with it.
        notes: what else a reader should know.
    """

    what: str
    whole: bool | None = None
    checked: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[TensorRow] = ()
    fault: str | None = None
    notes: list[str] = field(default_factory=list)
    bytes: int = 0

    def damaged(self, fault: object) -> "Finding":
        """The same, found to be damaged."""
        self.whole, self.fault = False, str(fault)
        return self

    def document(self, path: Path, all_tensors: bool) -> dict[str, Any]:
        """As a JSON object."""
        shown = self.tensors if all_tensors else self.tensors[:_FIRST_TENSORS]
        return {
            "path": str(path),
            "what": self.what,
            "whole": self.whole,
            "checked": self.checked,
            "fault": self.fault,
            "bytes": self.bytes,
            **{label.replace(" ", "_"): value for label, value in self.facts.items()},
            "notes": self.notes,
            "tensors": [each._asdict() for each in shown],
        }

    def text(self, path: Path, all_tensors: bool) -> str:
        """As aligned lines."""
        rows = [("path", str(path)), ("what", self.what), ("whole", self._whole())]
        rows += self.facts.items()
        rows.append(("size", size(self.bytes)))
        rows += [("note", each) for each in self.notes]
        width = max(len(label) for label, _ in rows) + 2
        lines = [_wrapped(f"{label:{width}}", _said(label, value)) for label, value in rows]
        return "\n".join(lines + self._table(all_tensors))

    def _whole(self) -> str:
        if self.whole is None:
            return f"not known: {self.checked}"
        if self.whole:
            return f"yes, by {self.checked}"
        return f"no: {self.fault}"

    def _table(self, all_tensors: bool) -> list[str]:
        if not self.tensors:
            return []
        shown = self.tensors if all_tensors else self.tensors[:_FIRST_TENSORS]
        cells = [(clean(each.name), dimensions(each.shape), each.dtype) for each in shown]
        widths = [max(len(row[i]) for row in [*cells, ("tensor", "shape")]) + 2 for i in (0, 1)]
        rows = [("tensor", "shape", "type"), *cells]
        lines = ["", *(f"{a:{widths[0]}}{b:{widths[1]}}{c}" for a, b, c in rows)]
        more = len(self.tensors) - len(shown)
        return [*lines, f"and {more:,} more; --tensors lists all of them"] if more else lines


def model_facts(config: TransformerConfig) -> dict[str, Any]:
    """Parameter counts and shape of a model, for `Finding.facts`."""
    if config.n_layers > MAX_LAYERS:
        return {"shape": f"{config.n_layers} layers, which no model has"}
    total, active = config.parameter_counts()
    dense = not config.moe_layers
    shape: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff",
            "max_seq_len",
        )
    }  # fmt: skip
    if not dense:
        shape |= {
            "moe_layers": len(config.moe_layers),
            "num_experts": config.num_experts,
            "experts_per_token": config.experts_per_token,
            "moe_d_ff": config.moe_d_ff,
        }
    return {
        "model": "dense" if dense else "mixture of experts",
        "parameters": {"total": total, "active": active},
        "shape": shape,
    }


def spoken(value: Any) -> str:
    """A value as a line of text; what a file says may be long, and hold what a terminal obeys."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case int():
            return f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
        case Mapping():
            # a number as the keys' own spelling has it, without separators beside commas
            return ", ".join(f"{clean(str(key))} {_plain(each)}" for key, each in value.items())
        case list() | tuple():
            return ", ".join(_plain(each) for each in value[:20]) + (", ..." * (len(value) > 20))
        case str():
            return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in value)
        case _:
            return clean(str(value))


def clean(text: str) -> str:
    """Text from a file in printable ASCII, cut short."""
    printable = ascii(text)[1:-1]
    return printable if len(printable) <= _LONGEST else printable[: _LONGEST - 3] + "..."


def size(count: int) -> str:
    """Bytes, exactly and in words."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count:,} bytes ({count / factor:,.1f} {unit})"
    return f"{count:,} bytes"


def dimensions(shape: tuple[int, ...]) -> str:
    """A shape as 61 x 32; a scalar has none."""
    return " x ".join(map(str, shape[:8])) + (" x ..." * (len(shape) > 8)) if shape else "scalar"


def _said(label: str, value: Any) -> str:
    if label == "parameters":
        return ", ".join(f"{spoken(count)} {key}" for key, count in value.items())
    return spoken(value)


def _wrapped(label: str, text: str) -> str:
    indent = " " * len(label)
    # long digests and paths stay whole, to be copied
    return textwrap.fill(
        text,
        100,
        initial_indent=label,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**6:
        return str(value)
    return spoken(value) if not isinstance(value, Mapping | list | tuple) else clean(str(value))
