"""`fastbrain doctor`: whether a run can be trained on this machine, and what would slow it down."""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

from fastbrain.commands.doctor_check import Check, safely
from fastbrain.commands.generate_options import refusing
from fastbrain.commands.generate_text import write
from fastbrain.training.command import DONE, FAILED

_EPILOG = """example:
  fastbrain doctor
  fastbrain doctor runs --json

DIR is where runs would lie (the current directory); up to 256 MB are written there and removed.
Exit codes: 0 a run can be trained; 1 something would stop it; 2 refused."""

_STATES = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `doctor`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("directory", nargs="?", default=".", metavar="DIR", help="of runs (.)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Look at everything and print it; returns the exit code."""
    return refusing(_examine, options)


def _examine(options: argparse.Namespace) -> int:
    from fastbrain.commands import doctor_device, doctor_disk, doctor_machine

    folder = Path(options.directory)
    # a directory that is not there is refused before anything else is looked at
    on_disk = doctor_disk.checks(folder)
    found = [
        *_looked("machine", doctor_machine.checks),
        *_looked("device", doctor_device.checks),
        *on_disk,
    ]
    able = all(each.state != "problem" for each in found)
    if options.json:
        document = {
            "able": able,
            "directory": str(folder),
            "checks": [each._asdict() for each in found],
        }
        write(json.dumps(document, indent=1) + "\n")
    else:
        write("\n".join([*map(_line, found), "", _closing(found, able)]) + "\n")
    return DONE if able else FAILED


def _looked(what: str, look: Callable[[], list[Check]]) -> list[Check]:
    found: list[Check] = []

    def all_of_it() -> Check:
        found.extend(look())
        return Check(what, "examined")

    whole = safely(what, all_of_it)
    return found if whole.state == "ok" else [*found, whole]


def _line(check: Check) -> str:
    lines = [f"{_STATES[check.state]:9}{check.name:13}{check.value}"]
    if check.advice:
        indent = " " * 22
        lines.append(
            textwrap.fill(check.advice, 100, initial_indent=indent, subsequent_indent=indent)
        )
    return "\n".join(lines)


def _closing(found: list[Check], able: bool) -> str:
    if not able:
        problems = [each.name for each in found if each.state == "problem"]
        return f"A run cannot be trained here yet: {', '.join(problems)}."
    warnings = sum(each.state == "warning" for each in found)
    if warnings:
        return f"A run can be trained here; {warnings} warning{'s' * (warnings > 1)}."
    return "A run can be trained here."
