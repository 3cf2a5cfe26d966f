"""`fastbrain verify`: whether the checkpoints and the tokens of a run are still what was written.

Only reads: nothing is renamed or deleted, no lock is taken, and a trainer may be at work meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastbrain.commands import verify_items
from fastbrain.commands.inspect_finding import clean, spoken
from fastbrain.commands.verify_items import Item
from fastbrain.errors import FastBrainError

INTACT, DAMAGED, REFUSED, NO_CHECKPOINT = 0, 1, 2, 3

_EPILOG = """example:
  fastbrain verify runs/first
  fastbrain verify runs/first/checkpoints/step-00002000
  fastbrain verify /mnt/backup/step-00002000 --json

Every file is read and compared with the SHA-256 that was recorded when it was written.
Exit codes: 0 all intact; 1 something is damaged; 2 neither a run nor a checkpoint, or one of a
newer fastbrain; 3 a run without an intact checkpoint."""

# the digest of one file keeps one core busy; the disk, or the other core, takes a second
_AT_ONCE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `verify`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("directory", metavar="DIR", help="of a run, or of one checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Verify what the options name and print it; returns the exit code."""
    path = Path(options.directory)
    try:
        is_run, checks = verify_items.of(path)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    started = time.perf_counter()
    items = []
    for item in _in_order(checks):
        items.append(item)
        if not options.json:
            print(_line(item), flush=True)
    seconds = time.perf_counter() - started
    code = _code(items, is_run)
    if options.json:
        print(json.dumps(_document(path, is_run, items, seconds, code), indent=1))
    else:
        print("\n".join(_closing(items, seconds, code)))
    return code


def _in_order(checks: Iterable[verify_items.Check]) -> Iterator[Item]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda check: check(), checks)


def _code(items: list[Item], is_run: bool) -> int:
    states = {each.state for each in items}
    if "newer" in states:
        return REFUSED
    intact = any(each.step is not None and each.state == "intact" for each in items)
    if is_run and not intact:
        return NO_CHECKPOINT
    return DAMAGED if "damaged" in states else INTACT


def _line(item: Item) -> str:
    count = f"{item.bytes:,}" if item.bytes else ""
    return f"{clean(item.name):28}{count:>18}  {spoken(item.words)}"


def _closing(items: list[Item], seconds: float, code: int) -> list[str]:
    read = sum(each.bytes_read for each in items)
    lines = [f"{read / 1e9:.3f} GB verified in {seconds:.1f} s, {_speed(read, seconds):.2f} GB/s"]
    damaged = sum(each.state == "damaged" for each in items)
    if code == NO_CHECKPOINT:
        lines.append("there is no intact checkpoint to go on from")
    elif code == DAMAGED:
        newest = max(
            (e.step for e in items if e.step is not None and e.state == "intact"), default=0
        )
        more = f"; the newest intact checkpoint is of step {newest:,}" if newest else ""
        lines.append(f"{damaged} damaged{more}")
    elif code == INTACT:
        lines.append("all intact")
    return lines


def _document(
    path: Path, is_run: bool, items: list[Item], seconds: float, code: int
) -> dict[str, Any]:
    read = sum(each.bytes_read for each in items)
    return {
        "path": str(path),
        "kind": "run" if is_run else "checkpoint",
        "intact": code == INTACT,
        "exit_code": code,
        "items": [each._asdict() for each in items],
        "bytes_read": read,
        "seconds": round(seconds, 3),
        "gb_per_s": round(_speed(read, seconds), 3),
    }


def _speed(read: int, seconds: float) -> float:
    return read / 1e9 / max(seconds, 1e-9)
