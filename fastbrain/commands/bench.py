"""`fastbrain bench`: runs the benchmark files of a checkout, and prints one table of them all."""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fastbrain
from fastbrain import atomic
from fastbrain.commands.bench_rows import Row, collected, table
from fastbrain.errors import FastBrainError, InvalidConfig

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """example:
  fastbrain bench
  fastbrain bench attention adam --json attention.json
  fastbrain bench --list

Every figure is a median. The last column is how many times as fast ours is as the fastest peer. On
a CPU operations run at a toy size, which shows that they work and nothing of a card.
Exit codes: 0 done, 1 a benchmark failed, 2 refused."""

_TOY = "there is no card here, so operations and models had toy sizes: quote none of their times"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (all of them)")
    parser.add_argument("--list", action="store_true", help="say which there are, and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")


def run(options: argparse.Namespace) -> int:
    """Run what was asked for; returns the exit code."""
    try:
        folder = _folder(Path(fastbrain.__file__).parents[1])
        files = _files(folder)
        if options.list:
            width = max(map(len, files))
            print("\n".join(f"{n:{width}}  {_purpose(file)}" for n, file in files.items()))
            return DONE
        chosen = _chosen(files, options.names)
        _check(options.json)
        return _bench(folder, chosen, options.json)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _folder(checkout: Path) -> Path:
    folder = checkout / "bench"
    if not (folder / "conftest.py").is_file():
        raise InvalidConfig(
            f"there are no benchmarks at {folder}: they are part of a checkout, not of the "
            "installed package; clone the repository and run `pip install -e '.[bench]'` in it"
        )
    return folder


def _files(folder: Path) -> dict[str, Path]:
    """Benchmark files by name."""
    return {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}


def _purpose(file: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def _chosen(files: Mapping[str, Path], names: list[str]) -> list[Path]:
    for name in names:
        if name not in files:
            raise InvalidConfig(f"there is no benchmark {name!r}; there are {', '.join(files)}")
    return [files[name] for name in dict.fromkeys(names or files)]


def _check(target: Path | None) -> None:
    """Refuses what would be found out only after minutes of timing."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise InvalidConfig(
            "TRITON_INTERPRET is set, and timings of interpreted kernels mean nothing; unset it "
            "to time, or run every benchmark once with `pytest bench --benchmark-disable`"
        )
    for package in ("pytest", "pytest_benchmark"):
        if find_spec(package) is None:
            raise InvalidConfig(
                f"the benchmarks need {package.replace('_', '-')}, which is not installed; "
                "`pip install -e '.[bench]'` in the checkout brings it"
            )
    if target is not None and not target.parent.is_dir():
        raise InvalidConfig(f"--json names {target}, but there is no folder {target.parent}")


def _bench(folder: Path, files: list[Path], target: Path | None) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        figures, report = Path(scratch, "figures.json"), Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--no-summary"]
        command += ["-p", "no:cacheprovider", "--benchmark-quiet"]
        command += [f"--benchmark-json={figures}", f"--junitxml={report}", *map(str, files)]
        # its progress is no part of the table
        done = subprocess.run(command, cwd=folder.parent, stdout=sys.stderr, check=False)
        found = figures.read_bytes() if figures.exists() else b""
        document: dict[str, Any] = json.loads(found or b"{}")
        text = report.read_text("utf-8") if report.exists() else ""
    if not text:
        print("fastbrain: pytest ended before any benchmark; it says why above", file=sys.stderr)
        return FAILED
    rows, broken = collected(document.get("benchmarks", []), text)
    machine = document.get("machine_info", {}).get("fastbrain", {})
    toy = machine.get("card", "none") == "none"
    if rows:
        print(table(rows))
        if toy:
            print(f"\n{_TOY}")
    for each in broken:
        print(f"fastbrain: {each}", file=sys.stderr)
    if target is not None:
        names = [file.stem.removeprefix("bench_") for file in files]
        _write(target, machine, names, rows, toy)
    failed = done.returncode or broken or any(row.failed for row in rows)
    return FAILED if failed else DONE


def _write(
    target: Path, machine: dict[str, str], names: list[str], rows: list[Row], toy: bool
) -> None:
    if not any(row.ms for row in rows):
        print(f"fastbrain: nothing was timed, so {target} is not written", file=sys.stderr)
        return
    command = " ".join(["fastbrain bench", *names])
    document = {
        "kind": "operations",
        "machine": {"command": command, **machine},
        "command": command,
        "toy": toy,
        "rows": [row.document() for row in rows],
    }
    atomic.write_bytes(target, (json.dumps(document, indent=1) + "\n").encode())
