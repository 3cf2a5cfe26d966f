"""Charts, made by hand: an SVG that stretches, and its numbers as text that does not.

A run of a week has half a million steps, and a screen a thousand columns. So a curve is one line
through the smallest and the largest number of every column, which shows every spike, and one
through medians, which shows where it goes; a page is as large after a week as after a day.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastbrain.training.report.axes import Axis, Numbers, written
from fastbrain.training.report.words import text

COLUMNS = 800
# points of the second curve that are dots; more of them would be a thick line
_DOTS = 40
# a median is over this share of the whole curve, so that it is as smooth after a week
_SHARE = 80
# the drawing is this wide and high, whatever it is stretched to
_SIZE = 1000


class Thinned(NamedTuple):
    """A curve by columns: where, smallest, largest, and the median around."""

    x: Numbers
    low: Numbers
    high: Numbers
    middle: Numbers

    @property
    def differs(self) -> bool:
        """Whether the medians are another line than the curve itself."""
        return bool((self.low < self.high).any() or (self.middle != self.low).any())


def thinned(x: Numbers, y: Numbers, columns: int = COLUMNS) -> Thinned:
    """A curve in at most `columns` columns.

    Args:
        x: rising.
        y: as many; what is not finite is left out.
        columns: how many.
    """
    fine = np.isfinite(x) & np.isfinite(y)
    x, y = x[fine], y[fine]
    if not len(x):
        return Thinned(x, y, y, y)
    width = (x[-1] - x[0]) / columns or 1.0
    column = np.minimum((x - x[0]) / width, columns - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    after = np.append(first[1:], len(x))
    reach = len(x) // _SHARE // 2
    middle = [
        # no further forward than back: the steep beginning would be smoothed away
        np.median(y[a - min(reach, a) : b + min(reach, a)])
        for a, b in zip(first.tolist(), after.tolist(), strict=True)
    ]
    return Thinned(
        x[(first + after - 1) // 2],
        np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
        np.array(middle),
    )


class Mark(NamedTuple):
    """A point on a chart: `kind` is a class of style.css, `title` what it says when touched."""

    x: float
    y: float
    kind: str
    title: str


class Span(NamedTuple):
    """A stretch of the x axis, or a place on it where `first` is `last`."""

    first: float
    last: float
    kind: str
    title: str


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: what is drawn; `unit` is what one of it is called.
        x, y: the axes.
        curve: drawn thinly by its extremes and boldly by its medians; None for none.
        points: of a second curve, a line through all of them.
        second: what those are called.
        marks, spans: what is pointed out.
        legend: (class, words) of what needs explaining.
        tall: whether it is the large one.
    """

    name: str
    unit: str
    x: Axis
    y: Axis
    curve: Thinned | None = None
    points: Sequence[tuple[float, float]] = ()
    second: str = ""
    marks: Sequence[Mark] = ()
    spans: Sequence[Span] = ()
    legend: Sequence[tuple[str, str]] = ()
    tall: bool = False

    def html(self) -> str:
        """The chart as a figure."""
        keys = "".join(
            f'<span><i class="{kind}"></i>{text(words)}</span>' for kind, words in self.legend
        )
        scale = " (log scale)" if self.y.logarithmic else ""
        drawn = [
            *(self._span(each) for each in self.spans),
            *self._lines(),
            *(self._mark(each) for each in self.marks),
        ]
        label = text(f"{self.name} by step")
        return (
            f'<figure class="chart{" tall" if self.tall else ""}">\n'
            f"<figcaption><b>{text(self.name)}</b> <small>{text(self.unit + scale)}</small>"
            f'<span class="legend">{keys}</span></figcaption>\n'
            f'<div class="plot">{self._labels()}'
            f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}">\n{self._grid()}' + "".join(drawn) + "</svg>"
            f'<script type="application/json">{json.dumps(self._numbers())}</script>'
            "</div>\n</figure>\n"
        )

    def _lines(self) -> list[str]:
        curve, lines = self.curve, []
        if curve is not None and len(curve.x):
            if curve.differs:
                lines.append(_line("raw", self._zigzag(curve)))
            lines.append(_line("smooth", self._points(zip(curve.x, curve.middle, strict=True))))
        if self.points:
            lines.append(_line("second", self._points(self.points)))
        # what lies outside ends at the edge
        inside = f'<svg width="{_SIZE}" height="{_SIZE}">' + "".join(lines) + "</svg>\n"
        if not self.points or len(self.points) > _DOTS:
            return [inside]
        return [
            inside,
            *(
                self._mark(Mark(x, y, "score", f"step {x:,.0f}: {self.second} {y:.4f}"))
                for x, y in self.points
            ),
        ]

    def _zigzag(self, curve: Thinned) -> str:
        ends = []
        for index, (x, low, high) in enumerate(zip(curve.x, curve.low, curve.high, strict=True)):
            # up one column and down the next, or every other stroke would be a slanting one
            pair = [(x, low), (x, high)] if index % 2 else [(x, high), (x, low)]
            ends += pair[: 1 + bool(low < high)]
        return self._points(ends)

    def _points(self, points: Any) -> str:
        places = [(self._across(x), self._down(y)) for x, y in points]
        # a single point would be an invisible line
        if len(places) == 1:
            places *= 2
        return "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in places)

    def _across(self, x: float) -> float:
        return _SIZE * self.x.place(x)

    def _down(self, y: float) -> float:
        place = self.y.place(y)
        # below every logarithm
        return _SIZE * (1 - (min(max(place, -1.0), 2.0) if math.isfinite(place) else -1.0))

    def _mark(self, mark: Mark) -> str:
        down = min(max(self._down(mark.y), 0.0), float(_SIZE))
        # hardly any length and round ends make a dot that stays round in a drawing that is
        # stretched; a square of no length at all would be missing in print
        return (
            f'<path class="mark {mark.kind}" d="M{self._across(mark.x):.1f} {down:.1f}h.1">'
            f"<title>{text(mark.title)}</title></path>\n"
        )

    def _span(self, span: Span) -> str:
        first, last = self._across(span.first), self._across(span.last)
        if last - first < 2:
            shape = f'<path class="{span.kind}" d="M{first:.1f} 0V{_SIZE}">'
            return f"{shape}<title>{text(span.title)}</title></path>\n"
        shape = f'<rect class="{span.kind}" x="{first:.1f}" width="{last - first:.1f}" '
        return f'{shape}height="{_SIZE}"><title>{text(span.title)}</title></rect>\n'

    def _grid(self) -> str:
        across = "".join(f"M0 {self._down(y):.1f}H{_SIZE}" for y in self.y.ticks(self._most()))
        return f'<path class="grid" d="{across}"/>\n' if across else ""

    def _labels(self) -> str:
        beside = [
            f'<span class="y" style="top:{self._down(y) / _SIZE:.2%}">{written(y)}</span>'
            for y in self.y.ticks(self._most())
        ]
        below = [
            f'<span class="x" style="left:{self.x.place(x):.2%}">{written(x)}</span>'
            for x in self.x.ticks(6 if self.tall else 4)
        ]
        return "".join(beside + below)

    def _most(self) -> int:
        return 7 if self.tall else 4

    def _numbers(self) -> dict[str, Any]:
        """What the pointer reads off, for the script: places across, steps, and values."""
        series = []
        if self.curve is not None and len(self.curve.x):
            series.append([self.name.lower(), self.curve.x, self.curve.middle])
        if self.points:
            series.append([self.second, *np.array(self.points).T])
        return {
            "low": self.x.low,
            "high": self.x.high,
            "series": [
                {
                    "name": name,
                    "x": [int(each) for each in x],
                    "y": [float(f"{each:.5g}") for each in y],
                }
                for name, x, y in series
            ],
        }


def _line(kind: str, path: str) -> str:
    return f'<path class="{kind}" d="{path}"/>'
