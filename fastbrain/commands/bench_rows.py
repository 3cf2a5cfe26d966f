"""The rows of a benchmark's table, from what pytest and pytest-benchmark wrote.

A benchmark is named `bench_<what>[<case>-<contender>]`, and a row has all contenders of one case.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

# the first that ran is ours; the reference is what a CPU runs, and fused is what a card does
_TWINS = ("fused", "reference")
_OWN = "fastbrain"

_NAME = re.compile(r"bench_\w+\[(?P<case>.*)-(?P<contender>[^-]*)\]", re.DOTALL)


@dataclass
class Row:
    """One case and everybody who was to run it, each by name.

    Attributes:
        name: the case.
        ms: median milliseconds of a call.
        peak_bytes: what a call held at most on a card, on top of its inputs.
        skipped: who could not run here, and why.
        failed: who should have run, and what went wrong.
        bytes: that the operation has to move; 0 where that says nothing.
        flops: that it has to do; likewise.
        tokens: that a call works on; likewise.
    """

    name: str
    ms: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0
    tokens: float = 0.0

    @property
    def ours(self) -> str | None:
        """Our contender that counts: the kernels where they ran, the faster of several ways."""
        twin = next((name for name in _TWINS if name in self.ms), None)
        return twin or self._fastest([name for name in self.ms if name.startswith(_OWN)])

    @property
    def peer(self) -> str | None:
        """The fastest of the others."""
        theirs = [n for n in self.ms if n not in _TWINS and not n.startswith(_OWN)]
        return self._fastest(theirs)

    @property
    def ratio(self) -> float | None:
        """How many times as fast ours is as the fastest peer."""
        if self.ours is None or self.peer is None:
            return None
        return self.ms[self.peer] / self.ms[self.ours]

    def document(self) -> dict[str, Any]:
        """The row as a result file has it."""
        return asdict(self) | {"ours": self.ours, "peer": self.peer, "ratio": self.ratio}

    def _fastest(self, names: list[str]) -> str | None:
        return min(names, key=self.ms.__getitem__, default=None)


def collected(benchmarks: list[Mapping[str, Any]], report: str) -> tuple[list[Row], list[str]]:
    """Rows in the order in which they ran, and what failed outside of any row.

    Args:
        benchmarks: of a file that pytest-benchmark wrote.
        report: the JUnit XML of the same run, which also knows what did not run.
    """
    timed = {each["name"]: each for each in benchmarks}
    rows: dict[str, Row] = {}
    broken = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = case.get("name", "")
        found = _NAME.fullmatch(name)
        if found is None:
            broken += [f"{name}: {reason}" for reason in _reasons(case, "failure", "error")]
            continue
        row = rows.setdefault(found["case"], Row(found["case"]))
        contender = found["contender"]
        for fate, kinds in ((row.skipped, ("skipped",)), (row.failed, ("failure", "error"))):
            for reason in _reasons(case, *kinds):
                fate[contender] = reason
        if name in timed and contender not in row.failed:
            _add(row, contender, timed[name])
    return list(rows.values()), broken


def table(rows: list[Row]) -> str:
    """Every case, under it every contender: median, rate, peak memory and how ours compares."""
    width = max(len(n) for row in rows for n in [*row.ms, *row.skipped, *row.failed])
    lines = [f"  {'':{width}}  {'median ms':>12}  {'rate':>16}  {'peak MiB':>9}"]
    for row in rows:
        lines.append(row.name)
        for name, ms in row.ms.items():
            peak = f"{row.peak_bytes[name] / 2**20:,.0f}" if name in row.peak_bytes else ""
            line = f"  {name:{width}}  {ms:12,.4f}  {_rate(row, ms):>16}  {peak:>9}"
            if name == row.ours and row.ratio is not None:
                line += f"  {row.ratio:.2f} x {row.peer}"
            lines.append(line.rstrip())
        for fate, names in (("skipped", row.skipped), ("FAILED", row.failed)):
            lines += [f"  {name:{width}}  {fate}: {reason}" for name, reason in names.items()]
    return "\n".join(lines)


def _add(row: Row, contender: str, benchmark: Mapping[str, Any]) -> None:
    extra = benchmark["extra_info"]
    # events leave out what Python and the launch cost
    row.ms[contender] = extra.get("event_ms", 1e3 * benchmark["stats"]["median"])
    for name in ("bytes", "flops", "tokens"):
        setattr(row, name, extra.get(name, 0.0))
    if "peak_bytes" in extra:
        row.peak_bytes[contender] = extra["peak_bytes"]


def _rate(row: Row, ms: float) -> str:
    if row.tokens:
        return f"{row.tokens / ms * 1e3:,.0f} tok/s"
    if row.flops:
        return _scaled(row.flops / ms * 1e3, ("GFLOPS", "TFLOPS"))
    return _scaled(row.bytes / ms * 1e3, ("MB/s", "GB/s")) if row.bytes else ""


def _scaled(rate: float, units: tuple[str, str]) -> str:
    """A rate in the larger unit from 1 of it on."""
    base = {"GFLOPS": 1e9, "MB/s": 1e6}[units[0]]
    small, large = rate / base, rate / base / 1e3
    return f"{large:,.1f} {units[1]}" if large >= 1 else f"{small:,.1f} {units[0]}"


def _reasons(case: ElementTree.Element, *kinds: str) -> Iterator[str]:
    for each in case:
        if each.tag in kinds:
            yield (each.get("message") or each.text or "no reason given").strip().splitlines()[0]
