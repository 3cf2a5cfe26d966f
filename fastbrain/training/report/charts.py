"""The four charts of a run: loss, and below it gradient norm, learning rate and speed."""

import math
from typing import Any

import numpy as np

from fastbrain.training.report.axes import Axis, Numbers, from_zero, spanning
from fastbrain.training.report.curves import COLUMNS, Chart, Mark, Span, Thinned, thinned
from fastbrain.training.report.story import Story
from fastbrain.training.report.words import loss, number, plural, section, short


def charts(story: Story) -> str:
    """The section of the curves."""
    columns = story.columns
    steps = columns["step"]
    if not len(steps) and not story.scores:
        return section("Curves", '<p class="none">No step has been logged yet.</p>\n')
    ends = [*steps[:1], *steps[-1:], *(step for step, _ in story.scores)]
    last = max(ends)
    x = Axis(min(1.0, *ends), last if last > 1 else 2.0)
    curves = {name: thinned(steps, columns[name]) for name in columns}
    spans = _spans(story)
    small = [
        _small("Gradient norm", "before clipping", x, curves["grad_norm"], spans),
        _small("Learning rate", "", x, curves["learning_rate"], spans, from_zero),
        _small("Speed", "tokens/s", x, curves["tokens_per_s"], spans, from_zero),
    ]
    body = _large(story, x, curves["loss"], spans) + f'<div class="trio">{"".join(small)}</div>\n'
    return section("Curves", body)


def _large(story: Story, x: Axis, curve: Thinned, spans: list[Span]) -> str:
    raw = story.columns["loss"]
    must = [*curve.middle.tolist(), *(value for _, value in story.scores)]
    y = spanning(raw[np.isfinite(raw)], must)
    marks = _marks(story.guard, x, y)
    best = story.best
    if best is not None:
        title = f"step {best[0]:,.0f}: best held-out loss {loss(best[1])}"
        marks.append(Mark(*best, "best", title))
    legend = [("smooth", "training, median" if curve.differs else "training")]
    legend += [("raw", "training, every step")] * curve.differs
    legend += [("second", "held-out")] * bool(story.scores)
    legend += [("best", "best")] * (best is not None)
    kinds = {row["kind"] for row in story.guard}
    legend += [(kind, kind) for kind in ("spike", "skip", "rollback") if kind in kinds]
    legend += [("start", "resume")] * any(each.kind == "start" for each in spans)
    return Chart(
        "Loss",
        "nats per token, by step",
        x,
        y,
        curve,
        story.scores,
        "held-out",
        marks,
        spans,
        legend,
        True,
    ).html()


def _small(
    name: str, unit: str, x: Axis, curve: Thinned, spans: list[Span], axis: Any = None
) -> str:
    values: Numbers = np.concatenate([curve.low, curve.high])
    y = axis(values) if axis else spanning(values, curve.middle.tolist())
    return Chart(name, unit, x, y, curve, spans=spans).html()


def _spans(story: Story) -> list[Span]:
    """Rollbacks as stretches, and where each later start takes over as a line."""
    spans = []
    for row in story.guard:
        if row["kind"] == "rollback":
            first, last = number(row.get("first")), number(row.get("last"))
            if math.isfinite(first) and math.isfinite(last):
                title = f"rollback: steps {first + 1:,.0f} to {last + 1:,.0f} were given up"
                spans.append(Span(first + 1, last + 1, "rollback", title))
    for each in story.starts[1:]:
        if not each.rolled_back:
            title = f"start {each.start} goes on with step {each.first:,}"
            spans.append(Span(each.first, each.first, "start", title))
    return spans[-COLUMNS:]


def _marks(guard: list[dict[str, Any]], x: Axis, y: Axis) -> list[Mark]:
    """Spikes and skips, one of a kind in a column."""
    newest: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
    for row in guard:
        if row["kind"] in ("spike", "skip"):
            column = (row["kind"], int(x.place(row["step"]) * COLUMNS / 2))
            much = newest.get(column, (0, row))
            newest[column] = (much[0] + 1, max(much[1], row, key=_loss))
    marks = []
    for (kind, _), (many, row) in newest.items():
        title = f"step {row['step']:,}: {kind}, loss {loss(row.get('loss'))}"
        title += f", gradient norm {short(row.get('grad_norm'))}"
        if many > 1:
            title += f", and {plural(many - 1, 'more ' + kind)} near it"
        # a skip may have no loss at all: it stands on the axis
        value = y.low if kind == "skip" else _loss(row)
        marks.append(Mark(row["step"], value if math.isfinite(value) else y.high, kind, title))
    return marks


def _loss(row: dict[str, Any]) -> float:
    found = number(row.get("loss"))
    return found if math.isfinite(found) else math.inf
