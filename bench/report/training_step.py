"""Tables of `python -m bench.training_step --json FILE`."""

import statistics
from collections.abc import Mapping
from typing import Any

from bench import published
from bench.report import shapes
from bench.report.markdown import bullets, number, page, prose, table
from bench.report.results import MeasuredStep, Result

KIND = "training step"

_MIB = 2**20
_HEADER = ("contender", "tokens/s, median", "days for 50B", "rounds", "cores used", "peak MiB")
_RATIOS = ("ours", "fastest peer", "ratio", "by CPU time", "over Hugging Face")


def render(result: Result) -> str:
    """For every shape: the contenders, the ratio, and where the time goes if it was profiled."""
    return page(_shape(each) for each in result.body["results"]).rstrip("\n")


def steps(result: Result) -> list[MeasuredStep]:
    """Ours with BF16 operands, at every shape where a peer was there to compare with."""
    found = []
    for each in result.body["results"]:
        if "bf16" in each["ratio"]:
            ours = each["ratio"]["bf16"]["ours"]
            rate, peak = statistics.median(each["tokens_per_s"][ours]), each["peak_bytes"].get(ours)
            found.append(MeasuredStep(result.device, *shapes.parse(each["shape"]), rate, peak))
    return found


def _shape(found: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{name} {number(n)}" for name, n in found["parameters"].items())
    rows = [_contender(name, rates, found) for name, rates in found["tokens_per_s"].items()]
    parts = [prose(f"{found['shape']}. Parameters: {parameters}."), table(_HEADER, rows)]
    if found["ratio"]:
        parts += [table(_RATIOS, [_ratio(each) for each in found["ratio"].values()])]
    parts += [bullets(f"{name} did not run: {why}" for name, why in found["skipped"].items())]
    for key, columns in found.items():
        if key.startswith("profile "):
            precision = key.removeprefix("profile ")
            parts += [f"Milliseconds of a step under the profiler, {precision}:", _profile(columns)]
    return page(parts).rstrip("\n")


def _contender(name: str, rates: list[float], found: Mapping[str, Any]) -> list[str]:
    rate, peak = statistics.median(rates), found["peak_bytes"].get(name)
    return [
        name,
        number(rate),
        number(published.days(rate), 1),
        " ".join(number(value) for value in rates),
        number(statistics.median(found["cores"][name]), 2),
        number(peak and peak / _MIB),
    ]


def _ratio(each: Mapping[str, Any]) -> list[str]:
    numbers = (each["wall"], each["cpu"], each.get("hugging_face"))
    return [each["ours"], each["peer"], *(number(value, 3) for value in numbers)]


def _profile(columns: Mapping[str, Mapping[str, float]]) -> str:
    ours = next(iter(columns.values()))
    every = dict.fromkeys(group for column in columns.values() for group in column)
    groups = sorted(every, key=lambda group: -ours.get(group, 0.0))
    totals = {name: sum(column.values()) for name, column in columns.items()}
    rows = [
        [group, *(_share(column.get(group), totals[name]) for name, column in columns.items())]
        for group in groups
    ]
    return table(["", *columns], [*rows, ["total", *(number(t, 1) for t in totals.values())]])


def _share(ms: float | None, total: float) -> str:
    return "" if ms is None else f"{number(ms, 1)} ({100 * ms / total:.0f}%)"
