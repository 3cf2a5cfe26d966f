"""Many shapes, each in a process of its own, as a table in Markdown and in JSON.

A model that is still in memory would distort the next one's figures, and one that does not fit
should not end the others.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.sweep_arch.line import line, mib, short_count

Launch = Callable[[list[str]], "subprocess.CompletedProcess[str]"]

_COLUMNS = (
    "shape", "parameters, M", "active, M", "tok/s", "lowest-highest", "TFLOPS", "MFU",
    "peak", "device peak", "days",
)  # fmt: skip

# none of them is measured
_RANKS_COLUMNS = (
    "predicted: ranks", "predicted: memory of a rank", "predicted: communication, ms",
    "predicted: waited for, ms", "predicted: tok/s of all ranks",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the file and what became of it: a document, or why there is none."""

    text: str
    document: dict[str, Any] | None
    failure: str | None


def run(
    path: Path, flags: list[str], json_wanted: bool = False, launch: Launch | None = None
) -> int:
    """Measure every shape of a file; returns 1 if any failed, else 0.

    Args:
        path: a command line's arguments a row; what follows a # is a comment.
        flags: arguments that every row gets, before its own.
        json_wanted: whether the JSON document goes to the output as well, instead of lines.
        launch: runs this program with some arguments; a subprocess unless given.

    Raises:
        InvalidConfig: there are no rows, or a result would replace the file.
        Io: the file cannot be read, or a result cannot be written.
    """
    texts = _rows(path)
    markdown, document = _beside(path, ".md"), _beside(path, ".json")
    command = shlex.join(["python", "-m", "fastbrain.sweep_arch", "--table", str(path), *flags])
    rows: list[Row] = []
    # before the first row, which may take minutes: can they be written at all?
    _write(markdown, document, command, rows)
    for text in texts:
        rows.append(_measured(text, flags, launch or _launch))
        _write(markdown, document, command, rows)
        if not json_wanted:
            print(_spoken(rows[-1]), flush=True)
    if json_wanted:
        print(json.dumps(_document(command, rows)))
    return 1 if any(row.failure for row in rows) else 0


def _rows(path: Path) -> list[str]:
    with atomic.io_errors("read", path):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise InvalidConfig(f"{path} is not text in UTF-8: {error}") from error
    stripped = (each.partition("#")[0].strip() for each in lines)
    rows = [each for each in stripped if each]
    if not rows:
        raise InvalidConfig(
            f"{path} has no shapes: write one a line, such as 32000 1024 20 8 512 1 8 2"
        )
    return rows


def _beside(path: Path, suffix: str) -> Path:
    result = path.with_suffix(suffix)
    if result.exists() and os.path.samefile(result, path):
        raise InvalidConfig(
            f"--table is {path}, and the results would replace it: call it something that does "
            "not end in .md or .json, such as shapes.txt"
        )
    return result


def _measured(text: str, flags: list[str], launch: Launch) -> Row:
    try:
        words = shlex.split(text)
    except ValueError as error:
        return Row(text, None, f"this is no command line: {error}")
    if any(word.partition("=")[0] == "--table" for word in words):
        return Row(text, None, "a row is one shape, not a table: leave out --table")
    done = launch([*flags, *words, "--json"])
    sys.stderr.write(done.stderr)
    if done.returncode:
        return Row(text, None, _failure(done))
    try:
        return Row(text, dict(json.loads(done.stdout)), None)
    except ValueError:
        return Row(text, None, "it ended well and printed no figures: is there a --help in it?")


def _launch(words: list[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fastbrain.sweep_arch", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failure(done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode < 0:
        killed = done.returncode == -signal.SIGKILL
        why = ", most likely because the machine ran out of memory" if killed else ""
        return f"ended by signal {-done.returncode}{why}"
    lines = [each for each in done.stderr.splitlines() if each.strip()]
    own = (each for each in lines if each.startswith("fastbrain: "))
    errors = [each for each in own if not each.startswith("fastbrain: warning: ")]
    said = (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]
    return said.removeprefix("fastbrain: ")


def _write(markdown: Path, document: Path, command: str, rows: list[Row]) -> None:
    content = json.dumps(_document(command, rows), indent=1) + "\n"
    atomic.write_bytes(document, content.encode())
    atomic.write_bytes(markdown, _markdown(command, rows).encode())


def _document(command: str, rows: list[Row]) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "rows": [
            {"arguments": row.text, "failure": row.failure, "result": row.document} for row in rows
        ],
    }


def _commit() -> str:
    """Of the checkout that this runs from; "unknown" where it is none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError):
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def _spoken(row: Row) -> str:
    return f"{row.text:30}  FAILED: {row.failure}" if row.document is None else line(row.document)


def _markdown(command: str, rows: list[Row]) -> str:
    done = [row.document for row in rows if row.document is not None]
    lines = [f"    {command}", ""]
    # each once, in the order of the rows
    lines += dict.fromkeys(f"- {_machine(each)}" for each in done)
    several = any(each["predicted_ranks"] is not None for each in done)
    columns = _COLUMNS + (_RANKS_COLUMNS if several else ())
    lines += ["", _table_row(columns), _table_row(["---"] + ["---:"] * (len(columns) - 1))]
    for row in rows:
        cells = _cells(row) + (_rank_cells(row) if several else [])
        lines.append(_table_row([f"`{row.text}`", *cells]))
    warned = [f"- `{row.text}`: {text}" for row in rows for text in _warnings(row)]
    return "\n".join(lines + [""] * bool(warned) + warned) + "\n"


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _machine(document: dict[str, Any]) -> str:
    device, versions, gpu = document["device"], document["versions"], document["gpu"] or {}
    count = device["threads"]
    threads = f", {count} thread{'s' if count > 1 else ''}" if count else ""
    driver = f", driver {gpu['driver']}" if gpu.get("driver") else ""
    precision = "BF16 operands" if document["mixed_precision"] else "FP32"
    return (
        f"{device['name']}{threads}{driver}, {precision}, torch {versions['torch']}, "
        f"triton {versions['triton']}"
    )


def _cells(row: Row) -> list[str]:
    if row.document is None:
        return [f"FAILED: {row.failure}"] + [""] * (len(_COLUMNS) - 2)
    found = row.document
    rate, mfu, memory = found["tokens_per_s"], found["mfu"], found["memory"]
    return [
        f"{found['parameters']['total'] / 1e6:.1f}",
        f"{found['parameters']['active'] / 1e6:.1f}",
        f"{rate['median']:.0f}",
        f"{rate['lowest']:.0f}-{rate['highest']:.0f}",
        f"{found['tflops']:.4g}",
        "unknown" if mfu is None else f"{mfu:.1%}",
        mib(memory["peak_bytes"]),
        mib(memory["device_peak_bytes"]) if "device_peak_bytes" in memory else "",
        f"{found['days']:.1f} for {short_count(found['tokens'])}",
    ]


def _rank_cells(row: Row) -> list[str]:
    found = None if row.document is None else row.document["predicted_ranks"]
    if found is None:
        return [""] * len(_RANKS_COLUMNS)
    return [
        f"{found['ranks']} {found['parallel']}, {found['link']['name']}",
        mib(found["needed_bytes"]),
        f"{found['communication_ms']:.1f}",
        f"{found['exposed_ms']:.1f}",
        f"{found['tokens_per_s']:.0f}",
    ]


def _warnings(row: Row) -> list[str]:
    return [] if row.document is None else row.document["warnings"]
