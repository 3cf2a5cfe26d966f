"""What was measured of fastbrain: a table per result file, the files of a machine together."""

from collections.abc import Sequence
from pathlib import Path

from bench.report import device_check, operations, results, scaling, sweep, training_step
from bench.report.markdown import block, page
from bench.report.results import Kind, Kinds, MeasuredStep, Result

KINDS: Kinds = {
    training_step.KIND: Kind(training_step.render, steps=training_step.steps),
    operations.KIND: Kind(operations.render),
    scaling.KIND: Kind(scaling.render),
    sweep.KIND: Kind(sweep.render, "(MEASURED, beside PREDICTED)", sweep.machine, sweep.steps),
    device_check.KIND: Kind(
        device_check.render, "(MEASURED, beside PREDICTED)", steps=device_check.steps
    ),
}

_NOTHING = "No result file is there yet."


def load(folder: Path) -> list[Result]:
    """Every result of a folder, by file name.

    Raises:
        BadResult: a file cannot be used.
    """
    return results.load(folder, KINDS)


def section(found: Sequence[Result]) -> str:
    """Every result under the machine that it is of.

    Raises:
        BadResult: a file lacks what its tables show.
    """
    parts = ["## Measured: fastbrain where it has run", "" if found else _NOTHING]
    for device in dict.fromkeys(result.device for result in found):
        parts.append(f"### {device}")
        for result in found:
            if result.device == device:
                title = f"{result.kind[0].upper()}{result.kind[1:]} {KINDS[result.kind].title}"
                parts += [f"#### {title}", block(result.facts), results.render(result, KINDS)]
    return page(parts).rstrip("\n")


def steps(found: Sequence[Result]) -> list[MeasuredStep]:
    """Every training step of every result."""
    return [step for result in found for step in results.steps(result, KINDS)]
