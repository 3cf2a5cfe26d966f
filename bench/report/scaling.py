"""Tables of `python -m bench.scaling --json FILE`."""

import statistics
from collections.abc import Mapping
from typing import Any

from bench import published
from bench.report.markdown import bullets, number, page, prose, table
from bench.report.results import Result

KIND = "scaling"

_MIB = 2**20
_HEADER = (
    "ranks", "", "tokens/s, median", "lowest to highest", "days for 50B", "ms per step",
    "efficiency %", "peak MiB of a card",
)  # fmt: skip


def render(result: Result) -> str:
    """For every shape a row for each number of ranks and way to share the model."""
    return page(_shape(each) for each in result.body["results"]).rstrip("\n")


def _shape(found: Mapping[str, Any]) -> str:
    failed = (f"{_who(each)} failed: {each['why']}" for each in found["failed"])
    return page(
        [
            prose(f"{found['shape']} on each rank, {found['precision']}."),
            table(_HEADER, [_row(each) for each in found["runs"]]),
            bullets(failed),
        ]
    ).rstrip("\n")


def _who(each: Mapping[str, Any]) -> str:
    return f"{each['ranks']} ranks, {each['parallel']}" if each["ranks"] > 1 else "1 rank"


def _row(each: Mapping[str, Any]) -> list[str]:
    rates = each["tokens_per_s"]
    rate, efficiency = statistics.median(rates), each["efficiency"]
    return [
        number(each["ranks"]),
        each["parallel"],
        number(rate),
        f"{number(min(rates))} to {number(max(rates))}",
        number(published.days(rate), 1),
        number(each["ms_per_step"], 1),
        number(None if efficiency is None else 100 * efficiency, 1),
        number(each["peak_bytes"] / _MIB),
    ]
