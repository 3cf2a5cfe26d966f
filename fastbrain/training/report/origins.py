"""Where the result comes from: machine, versions, data and settings, and how to get it again."""

import shlex
from pathlib import Path
from typing import Any

from fastbrain.training.report.story import Story
from fastbrain.training.report.words import NOTHING, facts, number, section, size, text, value

_LABELS = {
    "fastbrain": "fastbrain",
    "python": "Python",
    "torch": "PyTorch",
    "triton": "Triton",
    "cuda": "CUDA",
}


def machine(story: Story) -> str:
    """The section of hardware, versions and data."""
    state = story.state
    versions = _table(state.get("versions"))
    hardware = [
        ("device", versions.get("device")),
        ("threads", state.get("threads")),
        ("processes", state.get("world_size")),
        ("shared by", state.get("parallel")),
        ("rows at a time", state.get("micro_batch_size")),
        ("optimizer", state.get("optimizer")),
        ("block sizes of the kernels", state.get("tile_table_sha256")),
    ]
    software = [(name, versions.get(key)) for key, name in _LABELS.items()]
    software += [(key, each) for key, each in versions.items() if key not in (*_LABELS, "device")]
    note = "No checkpoint has recorded the machine yet."
    if state:
        note = f"As of the checkpoint of step {value(state.get('step'))}."
    tables = facts(_known(hardware), "Hardware") + facts(_known(software), "Versions")
    body = f'<div class="pair">{tables}</div>\n' if state else ""
    return section("Machine", body, note)


def data(story: Story) -> str:
    """The section of the data's fingerprint."""
    if not story.data:
        return section("Data", '<p class="none">No tokens have been prepared yet.</p>\n')
    tables = "".join(facts(_file(file), part) for part, file in story.data.items())
    tokenizer = story.state.get("tokenizer_sha256")
    if tokenizer is not None:
        tables += facts([("sha256", tokenizer)], "tokenizer")
    return section("Data", f'<div class="pair">{tables}</div>\n')


def settings(story: Story) -> str:
    """The section of config.toml."""
    tables = story.run.tables
    parts = {name: table for name, table in tables.items() if isinstance(table, dict)}
    body = "".join(facts(list(table.items()), f"[{name}]") for name, table in parts.items())
    changed = tables.get("overridden")
    note = ""
    if isinstance(changed, list) and changed:
        note = f"Changed in the middle of the run: {', '.join(map(str, changed))}."
    return section("Settings", f'<div class="beside">{body}</div>\n', note)


def again(story: Story) -> str:
    """The section of exact commands."""
    run = story.run.path.resolve()
    threads = story.state.get("threads")
    alike = f"OMP_NUM_THREADS={threads} " if type(threads) is int else ""
    blocks = [
        (
            "Check that the token files are those that this run read:",
            "\n".join(_check(file) for file in story.data.values() if "sha256" in file),
        ),
        (
            "Go on with this run:",
            "" if story.standing == "done" else f"{alike}fastbrain resume {_quoted(run)}",
        ),
        (
            "Run it again from the first step, with the same settings:",
            f"{alike}fastbrain train {_quoted(run / 'config.toml')} "
            f"--run {_quoted(run.with_name(run.name + '-again'))}",
        ),
        ("Check every byte of its checkpoints:", f"fastbrain verify {_quoted(run)}"),
    ]
    body = "".join(
        f"<p>{text(said)}</p>\n<pre>{text(command)}</pre>\n" for said, command in blocks if command
    )
    return section("How to get this result again", body + _closing(story))


def _closing(story: Story) -> str:
    train = _table(story.run.tables.get("train"))
    versions = _table(story.state.get("versions"))
    shown = ", ".join(
        f"{_LABELS.get(key, key)} {value(each)}" for key, each in _known(list(versions.items()))
    )
    return facts(
        [
            ("seed", train.get("seed")),
            ("run id", story.run.run_id),
            ("settings, sha256", story.state.get("config_sha256")),
            ("versions", shown or NOTHING),
        ]
    ) + (
        '<p class="note">The same data, settings, versions, device and threads give the same bits; '
        "others give nearly the same losses.</p>\n"
    )


def _file(file: dict[str, Any]) -> list[tuple[str, object]]:
    found = dict(file)
    length = number(found.get("bytes"))
    if length >= 0:
        found["bytes"] = f"{length:,.0f} ({size(length)})" if length >= 1000 else f"{length:.0f}"
    for key in ("tokens", "max_id"):
        if type(found.get(key)) is int:
            found[key] = f"{found[key]:,}"
    return [(key.replace("_", " "), each) for key, each in found.items()]


def _check(file: dict[str, Any]) -> str:
    line = f"{file['sha256']}  {file.get('path')}"
    return f"echo {shlex.quote(line)} | sha256sum --check"


def _known(rows: list[tuple[str, object]]) -> list[tuple[str, object]]:
    return [(name, each) for name, each in rows if each is not None]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _table(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}
