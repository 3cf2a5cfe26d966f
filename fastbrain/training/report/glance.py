"""The top of the page: what the run is, how far it is, and how well it goes."""

import time

import numpy as np

from fastbrain.training.progress import short_count, short_time
from fastbrain.training.report.axes import Numbers
from fastbrain.training.report.story import Story
from fastbrain.training.report.words import NOTHING, count, loss, number, plural, size, text

# the loss of one step says little: this many, or a tenth of all, make a number to look at
_STEPS, _PART = 100, 10

_HUES = {"running": "busy", "done": "good", "stopped": "mild", "not begun": "calm"}


def header(story: Story, now: float) -> str:
    """Title, standing, and a sentence."""
    name = story.run.path.resolve().name
    return (
        f'<header><h1>{text(name)}</h1><span class="badge {_HUES[story.standing]}">'
        f"{story.standing}</span>\n<p>{text(_sentence(story))} Written {when(now)}.</p></header>\n"
        + _bar(story)
    )


def when(seconds: float) -> str:
    """A moment, in the time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds)).strip()


def glance(story: Story) -> str:
    """The numbers that say most."""
    tiles = [
        _tile("step", count(story.step), f"of {count(story.total)}" if story.total else ""),
        _loss(story),
        _held_out(story),
        _tokens(story),
        _speed(story),
        _time(story),
        _skipped(story),
        _memory(story),
    ]
    return f'<dl class="glance">\n{"".join(tiles)}</dl>\n'


def _sentence(story: Story) -> str:
    behind = story.step - story.saved
    if story.holder is not None:
        pid, host = story.holder.get("pid"), story.holder.get("host")
        who = "another process" if pid is None else f"process {pid} on {host}"
        return f"Being trained now by {who}."
    if story.standing == "done":
        return "Trained to the end."
    if story.standing == "not begun":
        return "No step has been finished yet."
    if not story.saved and any(each.aside != "superseded" for each in story.kept):
        return "No checkpoint is intact, so there is none to go on from."
    if not story.saved:
        return "There is no checkpoint to go on from: a resume begins again."
    if behind > 0:
        return f"A resume goes on from step {story.saved:,} and repeats {plural(behind, 'step')}."
    return f"A resume goes on from step {story.saved:,}."


def _bar(story: Story) -> str:
    if not story.total:
        return '<div class="bar"></div>\n'
    return f'<div class="bar"><i style="width:{min(story.step / story.total, 1):.1%}"></i></div>\n'


def _tile(name: str, shown: str, below: str = "") -> str:
    more = f"<dd>{text(below)}</dd>" if below else ""
    return f"<div><dt>{text(name)}</dt><dd>{text(shown)}</dd>{more}</div>\n"


def _loss(story: Story) -> str:
    found = _newest(story.columns["loss"])
    if not len(found):
        return _tile("training loss", NOTHING)
    below = f"median of {plural(len(found), 'step')}" if len(found) > 1 else ""
    return _tile("training loss", loss(float(np.median(found))), below)


def _held_out(story: Story) -> str:
    if story.best is None:
        return _tile("held-out loss", NOTHING, "not evaluated yet")
    step, best = story.best
    return _tile(
        "held-out loss", loss(story.scores[-1][1]), f"best {loss(best)} at step {count(step)}"
    )


def _tokens(story: Story) -> str:
    if story.settings is None:
        return _tile("tokens", count(number(story.last.get("tokens"))))
    each, total = story.settings.step_tokens, story.total or 0
    return _tile("tokens", short_count(story.step * each), f"of {short_count(total * each)}")


def _speed(story: Story) -> str:
    now = story.columns["start"][-1:]
    rates = story.columns["tokens_per_s"][story.columns["start"] == now]
    found = _newest(rates)
    if not len(found):
        return _tile("tokens/s", NOTHING)
    rate = float(np.median(found))
    settings, below = story.settings, ""
    left = (story.total or 0) - story.step
    if settings is not None and story.standing != "done" and rate > 0 and left > 0:
        below = f"{short_time(left * settings.step_tokens / rate)} left at this speed"
    return _tile("tokens/s", count(rate), below)


def _time(story: Story) -> str:
    if not story.starts:
        return _tile("time trained", NOTHING)
    starts = sum(not each.rolled_back for each in story.starts)
    return _tile("time trained", short_time(story.seconds), f"in {plural(starts, 'start')}")


def _skipped(story: Story) -> str:
    kinds = [row["kind"] for row in story.guard]
    skipped = number(story.last.get("skipped", 0))
    other = [plural(kinds.count(kind), kind) for kind in ("spike", "rollback") if kind in kinds]
    return _tile("skipped steps", count(skipped), ", ".join(other) or "no spikes")


def _memory(story: Story) -> str:
    peak = number(story.last.get("peak_bytes"))
    return _tile("peak memory", size(peak) if peak > 0 else NOTHING)


def _newest(values: Numbers) -> Numbers:
    finite: Numbers = values[np.isfinite(values)]
    return finite[-min(max(len(finite) // _PART, 1), _STEPS) :]
