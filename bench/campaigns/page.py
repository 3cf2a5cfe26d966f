"""The page of the campaigns: their results as Markdown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report.markdown import block, bullets, page, prose, table

_HEAD = """\
# Campaigns

`python -m bench.campaigns` writes this page out of the files in `bench/results/campaigns/`; with
`--check` it says whether the page is up to date. Do not edit it. The commands above the tables make
the files anew."""

_KILLS = """\
## Kills

Runs of a small mixture of experts, with evaluations, samples, asynchronous saves and deleted
checkpoints, are ended by `kill -9` and gone on with, often several times. A run counts as equal if
it then ends by exit code 0 with the bits of weights and moments, and with the rows of the history
and the samples that a run has which nothing disturbed: every step once."""

_DAMAGE = """\
## Damage

The newest of several checkpoints is damaged, and the newest intact one looked for. A case counts as
found if the refusal names the file, the damaged directory is kept with every byte, under a name of
its own, and the next older checkpoint is used. From one case of each kind a run then goes on, and
must end in the bits of one that nothing disturbed."""

_SAVING = """\
## What safety costs

Times of saves and of verifying, and of the program beside a loop that does nothing but train."""

_FATES = {
    "corrupt": "renamed, older one used",
    "foreign": "left alone, older one used",
    "newer": "the command stops and says so",
    "intact": "used: nothing is wrong",
}


def whole(folder: Path) -> str:
    """The page of a folder of results; a kind of campaign without a result is left out."""
    parts = [_HEAD]
    files = {
        path.name: json.loads(path.read_bytes())
        for path in sorted(folder.glob("*.json"), key=lambda each: each.stem)
    }
    for kind, words, tables in (
        ("kills", _KILLS, _kills),
        ("corruptions", _DAMAGE, _damage),
        ("saving", _SAVING, _saving),
    ):
        found = {name: body for name, body in files.items() if body.get("kind") == kind}
        if found:
            parts.append(words)
        for name, body in found.items():
            parts += [_about(body, name), *tables(body)]
    return page(parts)


def _kills(body: Mapping[str, Any]) -> Iterator[str]:
    labels = {
        "random": "random moments",
        "operations": "every operation of fastbrain.atomic",
        "calls": "every system call of one save",
    }
    found = {label: body[key] for key, label in labels.items() if key in body}
    header = ("kills at", "kills", "came back equal", "runs with temporaries left", "seconds")
    yield table(header, [
        (label, *_counts(part, "kills", "bit_equal"), str(len(part["orphans"])), _s(part))
        for label, part in found.items()
    ])  # fmt: skip
    if "random" in body:
        yield from _random(body["random"])
    for key, title in (("operations", "operation"), ("calls", "call")):
        if key in body:
            counts = sorted(body[key][f"by_{title}"].items())
            what = ", ".join(f"{name} {count}" for name, count in counts)
            yield prose(f"Kills by {title}: {what}.")
    for part in found.values():
        yield from _wrong([*part["failures"], *part["orphans"]])


def _random(part: Mapping[str, Any]) -> Iterator[str]:
    yield "Where the random kills fell, by the files that they left:"
    yield table(("phase", "kills"), [(what, str(n)) for what, n in part["by_phase"].items()])
    yield prose(
        "How many finished steps a kill cost, by the steps from save to save. A save is written "
        "while training goes on, so that besides the steps since the last one those may be lost "
        "that were trained while it was written; twice the interval is the limit."
    )
    lost = {key: counts for key, counts in part["lost_steps"].items() if counts}
    most = max(int(steps) for counts in lost.values() for steps in counts)
    yield table(("steps lost", *map(str, range(most + 1))), [
        (f"a save every {key} steps" if key != "1" else "a save every step",
         *(str(counts.get(str(steps), 0)) for steps in range(most + 1)))
        for key, counts in lost.items()
    ])  # fmt: skip
    yield prose(
        f"{part['runs']:,} runs. "
        f"{part['ended_before_the_kill']:,} starts had come to their end before their kill, and "
        "are not counted."
    )


def _damage(body: Mapping[str, Any]) -> Iterator[str]:
    times, size = body["fall_back_ms"], body["checkpoint_bytes"]
    yield prose(
        f"{body['found']:,} of {body['trials']:,} cases were found. Looking for the newest intact "
        f"checkpoint of {size:,} bytes took {times['median']:.1f} ms in the median case of damage "
        f"and {times['longest']:.1f} ms in the longest, hashes included."
    )
    header = ("damage", "what must become of it", "cases", "it did", "went on equal", "longest, ms")
    yield table(header, [
        (kind, _FATES[row["fate"]], *_counts(row, "trials", "right"), _resumed(row),
         f"{row['longest_ms']:.1f}" if row["longest_ms"] else "")
        for kind, row in body["kinds"].items()
    ])  # fmt: skip
    stopped = sum(row["stopped"] for row in body["kinds"].values())
    if stopped:
        yield prose(
            f"In {stopped} of the cases of a flipped bit, the bit was in the number of the format: "
            "the command stopped and named the file, because it may be of a newer fastbrain."
        )
    yield from _wrong(body["failures"])


def _saving(body: Mapping[str, Any]) -> Iterator[str]:
    figures = {key: value for key, value in body.items() if isinstance(value, int | float)}
    yield table(("figure", "value"), [
        (key.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
        for key, value in figures.items()
    ])  # fmt: skip


def _about(body: Mapping[str, Any], name: str) -> str:
    about = {key: str(value) for key, value in body["machine"].items() if value != "none"}
    return block([*about.items(), ("file", f"bench/results/campaigns/{name}")])


def _counts(part: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(f"{part[key]:,}" for key in keys)


def _resumed(row: Mapping[str, Any]) -> str:
    return str(row["resumed"]) if row["fate"] == "corrupt" else ""


def _s(part: Mapping[str, Any]) -> str:
    return f"{part['seconds']:.0f}"


def _wrong(lines: Sequence[str]) -> Iterator[str]:
    found = [line.splitlines()[0] for line in lines]
    if found:
        yield "What went wrong:"
        yield bullets(found)
