"""What went wrong: spikes, skips and rollbacks, with the text that the step had read."""

from collections import Counter
from typing import Any

from fastbrain.training.progress import short_time
from fastbrain.training.report.story import Start, Story
from fastbrain.training.report.words import (
    NOTHING,
    count,
    folded,
    loss,
    number,
    plural,
    section,
    short,
    table,
    text,
)

_TITLE = "Spikes, skips and rollbacks"

# shown, the first of them at once; the rest is counted
_FIRST, _MOST, _MOST_STARTS, _MOST_ROWS = 12, 50, 20, 16
_HEAD, _WHOLE = 90, 400

_HUES = {"spike": "mild", "skip": "poor"}


def incidents(story: Story) -> str:
    """The section of the guard."""
    if not story.guard:
        return section(_TITLE, '<p class="none">None.</p>\n')
    counted = Counter(row["kind"] for row in story.guard if isinstance(row["kind"], str))
    note = ", ".join(plural(many, kind) for kind, many in counted.most_common(5))
    newest = story.guard[: -_MOST - 1 : -1]
    if len(story.guard) > len(newest):
        note += f"; the newest {len(newest)} are shown, guard.jsonl has them all"
    heads = ("step#", "", "loss#", "limit#", "gradient norm#", "limit#", "what it read")
    body = table(heads, map(_row, newest[:_FIRST]), "guard")
    if older := newest[_FIRST:]:
        body += folded(f"{len(older)} before these", table(heads, map(_row, older), "guard"))
    return section(_TITLE, body, note + ".")


def starts(story: Story) -> str:
    """The section of starts; empty when there is only one."""
    if len(story.starts) < 2:
        return ""
    newest = story.starts[: -_MOST_STARTS - 1 : -1]
    note = ""
    if len(newest) < len(story.starts):
        note = f"The newest {len(newest)} of {len(story.starts)}."
    rows = [_start(each, story) for each in newest]
    heads = ("start#", "", "first step#", "last step#", "steps of the history#", "time#")
    return section("Starts", table(heads, rows, "snug"), note)


def _start(each: Start, story: Story) -> list[str]:
    kept = int((story.columns["start"] == each.start).sum())
    how = "after a rollback" if each.rolled_back else "resumed"
    return [
        count(each.start),
        "begun" if each is story.starts[0] else how,
        count(each.first),
        count(each.last),
        count(kept),
        short_time(each.seconds),
    ]


def _row(row: dict[str, Any]) -> list[str]:
    kind = row["kind"] if isinstance(row["kind"], str) else "?"
    hue = _HUES.get(kind, "calm")
    start = [count(number(row["step"])), f'<span class="tag {hue}">{text(kind[:20])}</span>']
    if kind == "rollback":
        return [*start, "", "", "", "", text(_rollback(row))]
    return [
        *start,
        _bad(row, "loss"),
        loss(row.get("loss_limit")),
        _bad(row, "grad_norm"),
        short(row.get("norm_limit")),
        _text(row),
    ]


def _bad(row: dict[str, Any], key: str) -> str:
    found = number(row.get(key))
    if found != found:
        return "not finite"
    return loss(found) if key == "loss" else short(found)


def _rollback(row: dict[str, Any]) -> str:
    first, last = number(row.get("first")), number(row.get("last"))
    said = f"Steps {count(first + 1)} to {count(last + 1)} were given up and their rows passed over"
    if "reloaded" in row:
        said += f"; the run went on from step {count(number(row['reloaded']))}"
    return said + "."


def _text(row: dict[str, Any]) -> str:
    rows = row.get("rows")
    rows = [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []
    if not rows:
        return NOTHING
    head = " ".join(str(rows[0].get("text", "")).split())
    blocks = [
        f"<small>row {text(each.get('row', '?'))}, from token {count(number(each.get('offset')))}"
        f"</small><pre>{text(str(each.get('text', ''))[:_WHOLE])}</pre>"
        for each in rows[:_MOST_ROWS]
    ]
    more = f"<small>and {plural(len(rows) - _MOST_ROWS, 'more row')}</small>"
    return (
        f"<details><summary>{text(head[:_HEAD])}{'...' if len(head) > _HEAD else ''}</summary>"
        + "".join(blocks)
        + (more if len(rows) > _MOST_ROWS else "")
        + "</details>"
    )
