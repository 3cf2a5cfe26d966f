"""`python -m bench.device_check`: the parts one after another, a result file, and a short table."""

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench.device_check import conduct, table
from bench.device_check.parts import PARTS, Part

EXIT = """\
exit status: 0 if every part passed, 1 if one failed or ran over its budget, 2 if nothing was run
(no CUDA device and no --dry, or a wrong argument)"""


def main(arguments: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> None:
    """Runs the check; see the module's docstring, and `--help`, for what it does."""
    wanted = _parsed(arguments, parts)
    # so that a process which is told to end still ends the one that it waits for
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = wanted.only or [part for part in parts if not part.asked]
    # the first one says where this is, so it always runs
    chosen = [part for part in parts if part in chosen or part is parts[0]]
    document: dict[str, Any] = {"kind": "device check", "machine": {}, "parts": {}}
    deadline = time.time() + wanted.budget * sum(part.budget_s for part in chosen)
    for position, part in enumerate(chosen):
        print(f"== {part.name}: {part.about}", flush=True)
        later = wanted.budget * sum(other.budget_s for other in chosen[position + 1 :])
        found = conduct.run(part, deadline - later - time.time(), wanted.dry)
        document["parts"][part.name] = found
        if part is parts[0]:
            document["machine"] = _machine(found, wanted.dry)
        print(f"== {part.name}: {found['status']}, {found['seconds']} s", flush=True)
        # after every part, so that a run that is cut off leaves what it had
        _write(document, wanted.out)
    print(f"\n{table.text(document)}")
    bad = [n for n, found in document["parts"].items() if found["status"] != "passed"]
    sys.exit(1 if bad else 0)


def _parsed(arguments: list[str] | None, parts: tuple[Part, ...]) -> argparse.Namespace:
    names = [part.name for part in parts]

    def only(text: str) -> list[Part]:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no part is called {' or '.join(map(repr, unknown))}; they are {', '.join(names)}"
            )
        return [part for part in parts if part.name in text.split(",")]

    def factor(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
        return value

    listed = "\n".join(
        f"  {p.name:12} {p.budget_s:4.0f} s  {p.about}{'; only when named' if p.asked else ''}"
        for p in parts
    )
    parser = argparse.ArgumentParser(
        prog="bench/device_check.sh",
        description="Checks and times fastbrain on this machine's NVIDIA GPU.",
        epilog=f"parts, and what each may take:\n{listed}\n\n{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where <card>.json goes; bench/results unless given"
    )
    parser.add_argument("--only", type=only, metavar="PART,...", help="run these parts alone")
    parser.add_argument(
        "--budget", type=factor, default=1.0, metavar="FACTOR",
        help="of all budgets: 2 or 3 for a card much slower than an H200",
    )  # fmt: skip
    parser.add_argument(
        "--dry", action="store_true",
        help="every line at a toy size on the CPU; no times, and no file unless --out is given",
    )  # fmt: skip
    found = parser.parse_args(arguments)
    if found.out is None and not found.dry:
        found.out = conduct.ROOT / "bench/results"
    if found.out is not None:
        # found out now, and not after minutes on a card
        try:
            found.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out is {found.out}, which cannot be a folder: {error.strerror}")
    return found


def _machine(environment: dict[str, Any], dry: bool) -> dict[str, str]:
    """What the first part says of this machine; ends the run where there is nothing to check."""
    case = environment["cases"].get("machine", {})
    if "machine" not in case:
        reason = environment.get("error") or case.get("failed", "it does not say what it is")
        _refuse(f"{sys.executable} cannot run the check: {reason.splitlines()[-1]}")
    machine: dict[str, str] = case["machine"]
    if case["device"] is None and not dry:
        _refuse(
            f"There is no CUDA device that torch {machine['torch']} can use here; run "
            "bench/device_check.sh --dry to try every line on the CPU."
        )
    command = "bench/device_check.sh " + shlex.join(sys.argv[1:])
    return machine | {"command": command.strip()}


def _refuse(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(2)


def _write(document: dict[str, Any], folder: Path | None) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", document["machine"]["card"]).strip("-")
    beside = folder / f"{name}.json.new"
    beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(beside, folder / f"{name}.json")


if __name__ == "__main__":
    main()
