"""The little Markdown that the page is made of, and how its numbers are spelt."""

import textwrap
from collections.abc import Iterable, Sequence

from bench.published import Range

EMPTY = ""
_WIDTH = 110


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a cell's own bars and line breaks cannot break it.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under a header of {len(header)}: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def block(facts: Iterable[tuple[str, str]]) -> str:
    """What stands above a table: one fact a line, aligned; facts without a value are left out."""
    lines = [f"{name:14}{' '.join(value.split())}" for name, value in facts if value]
    return "\n".join(["```", *lines, "```"])


def prose(text: str) -> str:
    """A paragraph in lines of at most 110 characters."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(prose(f"* {line}").replace("\n", "\n  ") for line in lines)


def page(parts: Iterable[str]) -> str:
    """Parts with an empty line between them."""
    return "\n\n".join(part for part in parts if part) + "\n"


def number(value: float | None, digits: int = 0) -> str:
    """With commas and a fixed number of digits; empty for None."""
    return EMPTY if value is None else f"{value:,.{digits}f}"


def span(value: Range | None, digits: int = 0) -> str:
    """A figure, or the lowest and highest of several."""
    if value is None:
        return EMPTY
    low, high = number(value.low, digits), number(value.high, digits)
    return low if low == high else f"{low} to {high}"


def signed_percent(ratio: float) -> str:
    """0.034 as +3.4%; never -0.0%."""
    text = f"{100 * ratio:+.1f}%"
    return "+0.0%" if text == "-0.0%" else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
