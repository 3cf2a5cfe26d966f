"""What the run wrote beside its numbers: checkpoints, and samples of text."""

import re
from contextlib import suppress
from pathlib import Path

from fastbrain.training.report.kept import Kept
from fastbrain.training.report.story import Story
from fastbrain.training.report.words import count, folded, loss, plural, section, size, table, text

# shown; the rest is counted
_MOST_ASIDE, _OPEN, _MOST_SAMPLES = 20, 2, 40
_MOST_BYTES = 16_000

_SAMPLE = re.compile(r"step-(\d{8,18})\.txt")
_BETWEEN = "\n\n---\n\n"


def checkpoints(story: Story) -> str:
    """The section of checkpoints, the newest on top."""
    if not story.kept:
        return section("Checkpoints", '<p class="none">None has been written yet.</p>\n')
    counting = [each for each in story.kept if each.aside is None]
    aside = [each for each in story.kept if each.aside is not None]
    shown = sorted(counting + aside[-_MOST_ASIDE:], key=lambda each: (each.step, each.path.name))
    note = f"{size(sum(each.bytes for each in story.kept))} in all."
    if len(aside) > _MOST_ASIDE:
        note += f" {plural(len(aside) - _MOST_ASIDE, 'older one')} put aside not shown."
    best = story.best
    scores = {int(step): value for step, value in story.scores}
    rows = [
        [
            count(each.step),
            _standing(each) + _best(each, best),
            size(each.bytes),
            loss(scores[each.step]) if each.step in scores else "",
            f'<span class="mono">{text(each.path.name)}</span>',
        ]
        for each in shown[::-1]
    ]
    return section(
        "Checkpoints", table(("step#", "", "size#", "held-out#", ""), rows, "snug"), note
    )


def samples(story: Story) -> str:
    """The section of generated text: the newest to read, older ones folded."""
    found = []
    with suppress(OSError):
        for path in story.run.samples.iterdir():
            if name := _SAMPLE.fullmatch(path.name):
                found.append((int(name[1]), path))
    found.sort(reverse=True)
    blocks = []
    for index, (step, path) in enumerate(found[:_MOST_SAMPLES]):
        # one may be gone since it was listed
        with suppress(OSError):
            blocks.append(_sample(step, _read(path), index < _OPEN))
    if not blocks:
        return section("Samples", '<p class="none">None has been written yet.</p>\n')
    note = "Continuations of held-out text, which is gray."
    if len(found) > _MOST_SAMPLES:
        note += f" The newest {_MOST_SAMPLES} of {len(found)}; the others are in samples/."
    body = "".join(blocks[:_OPEN])
    if older := blocks[_OPEN:]:
        body += folded(f"{len(older)} older", "".join(older))
    return section("Samples", body, note)


def _standing(each: Kept) -> str:
    if each.aside is not None:
        return f'<span class="tag calm">{each.aside}</span>'
    if each.fault is None:
        return '<span class="tag calm">not verified</span>'
    if each.fault:
        return f'<span class="tag poor">damaged</span> {text(each.fault)}'
    return '<span class="tag good">valid</span>'


def _best(each: Kept, best: tuple[float, float] | None) -> str:
    found = best is not None and each.aside is None and each.step == best[0]
    return ' <span class="tag mild">best</span>' if found else ""


def _read(path: Path) -> str:
    with path.open("rb") as file:
        found = file.read(_MOST_BYTES + 1)
    cut = "\n..." if len(found) > _MOST_BYTES else ""
    return found[:_MOST_BYTES].decode("utf-8", "replace").rstrip("\n") + cut


def _sample(step: int, content: str, shown: bool) -> str:
    blocks = "".join(_block(each) for each in content.split(_BETWEEN))
    title = f"step {step:,}"
    if shown:
        return f'<div class="sample"><h3>{title}</h3>{blocks}</div>\n'
    return f'<details class="sample"><summary>{title}</summary>{blocks}</details>\n'


def _block(content: str) -> str:
    # the beginning stands in brackets; it may hold some itself, which only shades it differently
    prompt, bracket, rest = content.partition("]")
    if not (bracket and prompt.startswith("[")):
        return f"<pre>{text(content)}</pre>\n"
    return f'<pre><span class="prompt">{text(prompt[1:])}</span>{text(rest)}</pre>\n'
