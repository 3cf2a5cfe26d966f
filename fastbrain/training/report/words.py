"""Numbers, sizes and text as the page shows them. What a run holds is hostile until it is here."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

NOTHING = "\u2013"

# what would not show, or would turn the text around it the other way
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\uffff]"
)


def text(value: object) -> str:
    """Text for an element or a quoted attribute; characters that do not show are spelled out."""
    return html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value)))


def number(value: object) -> float:
    """A number of a row, NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def count(value: float) -> str:
    """12,345."""
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def loss(value: object) -> str:
    """Four decimals, as long as they say anything."""
    found = number(value)
    return f"{found:.4f}" if 1e-3 <= abs(found) < 1e4 else short(found)


def short(value: object) -> str:
    """Four digits, whatever the size."""
    found = number(value)
    return f"{found:.4g}" if math.isfinite(found) else NOTHING


def size(count: float) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def value(found: Any) -> str:
    """A setting or a fact as it stands in a table, not escaped."""
    if found is None:
        return NOTHING
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, list | tuple):
        return "[" + ", ".join(map(value, found)) + "]"
    if isinstance(found, dict):
        return ", ".join(f"{key} {value(each)}" for key, each in found.items())
    return str(found)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table; a head that ends in `#` stands over a column of numbers. Cells are HTML."""
    classes = [" class=num" if head.endswith("#") else "" for head in heads]

    def line(tag: str, cells: Iterable[str]) -> str:
        each = zip(cells, classes, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in each) + "</tr>\n"

    top = line("th", (head.rstrip("#") for head in heads))
    body = "".join(line("td", cells) for cells in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead>{top}</thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def folded(title: str, body: str) -> str:
    """HTML that is shown when asked for."""
    return f'<details class="more"><summary>{text(title)}</summary>\n{body}</details>\n'


def facts(rows: Iterable[tuple[str, object]], title: str = "") -> str:
    """Labels and values, one below the other; both are plain text."""
    caption = f"<caption>{text(title)}</caption>" if title else ""
    body = "".join(
        f'<tr><th scope="row">{text(label)}</th><td>{text(value(each))}</td></tr>\n'
        for label, each in rows
    )
    return f'<table class="facts">{caption}<tbody>\n{body}</tbody></table>\n'


def section(title: str, body: str, note: str = "") -> str:
    """A part of the page under a heading; `note` is a line of plain text below that."""
    said = f'<p class="note">{text(note)}</p>\n' if note else ""
    return f"<section>\n<h2>{text(title)}</h2>\n{said}{body}</section>\n"
