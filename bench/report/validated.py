"""How far the planner's model of time is off, where there is something to hold it against."""

import statistics
from collections.abc import Iterator, Sequence

from bench import published
from bench.reference_crate import Validation, validation
from bench.report import shapes
from bench.report.markdown import block, bullets, number, page, prose, signed_percent, span, table

COMMAND = "python -m bench.report validated"

# how near the model has to come to these rows
BARS = {
    "dense-102m-4x512": 0.15,
    "dense-102m-4x1024": 0.15,
    "dense-102m-8x512": 0.15,
    "stage-recorded": 0.20,
}
_WHAT = (
    "Nobody can check the predictions above yet, but the same model of time can be given the "
    "operations that the reference crate does, and be held against what the crate measured. An "
    "error above zero is a prediction that is too slow. A launch-bound step is short enough for "
    "the gaps between its kernels to count, which no list of operations says much about."
)
_HEADER = (
    "model", "batch", "crate", "published ms", "published days for 50B", "PREDICTED ms",
    "PREDICTED days for 50B", "error", "bar", "launch-bound",
)  # fmt: skip


def section() -> str:
    """The error of every published step, and what the misses come from."""
    found = validation()
    return page(
        [
            "### The reference crate's own operations (PREDICTED, beside published)",
            prose(_WHAT),
            block([("command", COMMAND), ("device", published.card().name)]),
            table(_HEADER, [_row(each) for each in found]),
            prose(_summary(found)),
            bullets(_reasons(found)),
        ]
    ).rstrip("\n")


def _row(each: Validation) -> list[str]:
    row, bar = each.row, BARS.get(each.row.id)
    verdict = ""
    if bar is not None:
        verdict = f"{100 * bar:.0f}%: {'met' if abs(each.error) <= bar else 'missed'}"
    return [
        shapes.model(row.config),
        shapes.batch(row.batch, row.seq),
        row.generation,
        span(row.step_ms, 1),
        number(row.days, 1),
        number(each.predicted_ms, 1),
        number(published.days(row.tokens / each.predicted_ms * 1e3), 1),
        signed_percent(each.error),
        verdict,
        "yes" if each.launch_bound else "",
    ]


def _summary(found: Sequence[Validation]) -> str:
    bound = [each for each in found if each.launch_bound]
    rest = [each for each in found if not each.launch_bound]
    text = [_mean("the steps that are not launch-bound", rest)]
    text += [_mean("the launch-bound ones", bound)] if bound else []
    return " ".join(text)


def _reasons(found: Sequence[Validation]) -> Iterator[str]:
    """Every note once, with the steps that it is of."""
    for note in dict.fromkeys(each.note for each in found if each.note):
        names = "; ".join(_name(each) for each in found if each.note == note)
        yield f"{names}: {note.rstrip('.')}."


def _mean(what: str, found: Sequence[Validation]) -> str:
    errors = [abs(each.error) for each in found]
    worst = max(found, key=lambda each: abs(each.error))
    return (
        f"Over {what} ({len(found)}), the mean distance is {100 * statistics.fmean(errors):.1f}% "
        f"and the largest {signed_percent(worst.error)}, of {_name(worst)}."
    )


def _name(each: Validation) -> str:
    row = each.row
    where = f"{shapes.model(row.config)}, {shapes.batch(row.batch, row.seq)}"
    return f"{where} ({row.generation})"
