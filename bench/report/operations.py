"""Tables of `fastbrain bench --json FILE`, and of the operations in a device check."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bench import published
from bench.report.markdown import bullets, number, page, table
from bench.report.results import Result

KIND = "operations"

_MIB = 2**20
# of what is run at a toy size on a CPU, these have the size that they have everywhere
_NEVER_TOY = ("read a batch", "text to ids")
_STEP = "training step"
_HEADER = (
    "case", "ours", "ms", "rate", "fastest peer", "ms", "times as fast", "others, ms",
    "peak MiB, ours", "peak MiB, peer", "days for 50B",
)  # fmt: skip


def render(result: Result) -> str:
    """Every case with its contenders; of those at a toy size, only how many there were."""
    rows = result.body["rows"]
    quoted = [row for row in rows if not result.body["toy"] or row["name"] in _NEVER_TOY]
    parts = [of_rows(quoted)] if quoted else []
    if left := len(rows) - len(quoted):
        parts += [f"{left} of {len(rows)} cases ran at a CPU's toy size, which is not quoted."]
    return page(parts).rstrip("\n")


def of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of rows as `fastbrain bench` writes them, and below it what did not run."""
    rows = list(rows)
    notes = [note for row in rows for note in _notes(row)]
    cells = [_row(row) for row in rows if row["ms"]]
    return page([table(_HEADER, cells), bullets(dict.fromkeys(notes))]).rstrip("\n")


def of_cases(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The same of the cases of a device check."""
    return of_rows(
        {
            **case,
            "name": name,
            "ours": "fused",
            "peer": case.get("fastest_peer"),
            "ratio": case.get("ratio"),
            "skipped": case["errors"],
            "failed": {},
            "peak_bytes": {},
            "tokens": 0,
        }
        for name, case in cases.items()
    )


def _row(row: Mapping[str, Any]) -> list[str]:
    ms, ours, peer = row["ms"], row["ours"], row["peer"]
    others = ", ".join(f"{who} {number(t, 3)}" for who, t in ms.items() if who not in (ours, peer))
    own = ms.get(ours)
    rate = row["tokens"] / own * 1e3 if own and row["name"].startswith(_STEP) else None
    return [
        row["name"],
        ours or "",
        number(own, 3),
        _rate(row, own) if own else "",
        peer or "",
        number(ms.get(peer), 3),
        number(row["ratio"], 2),
        others,
        *(_mib(row["peak_bytes"].get(who)) for who in (ours, peer)),
        number(rate and published.days(rate), 1),
    ]


def _rate(row: Mapping[str, Any], ms: float) -> str:
    if row["tokens"]:
        return f"{number(row['tokens'] / ms * 1e3)} tokens/s"
    if row["flops"]:
        return f"{number(row['flops'] / ms / 1e9, 1)} TFLOPS"
    if not row["bytes"]:
        return ""
    gb_per_s = row["bytes"] / ms / 1e6
    return f"{number(gb_per_s, 1)} GB/s" if gb_per_s >= 1 else f"{number(1e3 * gb_per_s, 1)} MB/s"


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{who} did not run: {why}" for who, why in row["skipped"].items())
    yield from (f"{row['name']}: {who} FAILED: {why}" for who, why in row["failed"].items())


def _mib(count: float | None) -> str:
    return number(None if count is None else count / _MIB)
