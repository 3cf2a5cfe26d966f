"""`python -m fastbrain.kernels.report`: compile for cards that are not here, judge the code.

Every specialisation of every kernel is compiled at the shapes of `production`, its machine code is
read (`facts`) and held to its closed form (`closed_forms`) and to the gates (`gates`). The exit
status is 1 when a gate fails, and the report says which. docs/kernels.md explains the columns.

With `--simulated FILE` it writes what the planner wants to know of the same machine code instead.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from fastbrain.kernels import facts, gates, simulated
from fastbrain.kernels.closed_forms import name_of, work_of
from fastbrain.kernels.cycles import LIMITS
from fastbrain.kernels.facts import Facts
from fastbrain.kernels.gates import Gate
from fastbrain.kernels.launch import HOME
from fastbrain.kernels.machine_code import compiled, specialisation
from fastbrain.kernels.production import OPERATIONS, Case, Choice, cases, shapes

_DEFAULT_FAMILIES = (HOME, "sm_90")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Found(NamedTuple):
    """What a worker sends back.

    Attributes:
        facts: None where the kernel does not compile.
        error: why not.
        cpu_seconds: of the compilation.
    """

    facts: Facts | None
    error: str
    cpu_seconds: float


class Row(NamedTuple):
    """One specialisation, at the first launch that asks for it."""

    family: str
    case: Case
    found: Found
    gates: list[Gate]

    @property
    def title(self) -> str:
        kernel = name_of(self.case.launch)
        return f"{self.family} {kernel} {_dtype(self.case)} {self.case.shape}"


class Report(NamedTuple):
    """All specialisations of one card family, and the gates that are not of one alone."""

    family: str
    rows: list[Row]
    gates: list[Gate]

    @property
    def failed(self) -> list[str]:
        found = [(row.title, gate) for row in self.rows for gate in row.gates]
        found += [(self.family, gate) for gate in self.gates]
        return [f"{title}: {g.name}, found {g.found}" for title, g in found if not g.passed]


def report(families: Iterable[str], choice: Choice, jobs: int) -> list[Report]:
    """Compiles in `jobs` processes, from an empty cache."""
    chosen = {family: _distinct(family, choice) for family in families}
    tasks = [(family, n) for family, first_of in chosen.items() for n in first_of]
    with (
        tempfile.TemporaryDirectory(prefix="fastbrain-report-") as cache,
        ProcessPoolExecutor(jobs, get_context("spawn"), _start, (cache, choice)) as pool,
    ):
        results = dict(zip(tasks, pool.map(_compile, tasks), strict=True))
    return [
        _judged(family, {n: results[family, n] for n in first_of}, first_of)
        for family, first_of in chosen.items()
    ]


def write_simulated(path: Path, jobs: int, command: str) -> None:
    """Writes the planner's file; see `fastbrain.kernels.simulated`."""
    with (
        tempfile.TemporaryDirectory(prefix="fastbrain-report-") as cache,
        ProcessPoolExecutor(jobs, get_context("spawn"), _start, (cache, Choice())) as pool,
    ):
        content = {"command": command, "versions": _versions()} | simulated.shares(pool)
    # a row of the table to a line
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\s+([\d.,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "triton": triton.__version__}


def _distinct(family: str, choice: Choice) -> dict[int, list[Case]]:
    """By the number of the first launch of each specialisation, all launches of it."""
    first: dict[str, int] = {}
    found: dict[int, list[Case]] = {}
    for n, case in enumerate(cases(family, choice)):
        options = sorted(case.launch.options.items())
        key = f"{name_of(case.launch)} {specialisation(case.launch)} {options}"
        found.setdefault(first.setdefault(key, n), []).append(case)
    return found


# of a worker process: what it was asked for, and the launches of the families it has met
_choice = Choice()
_cases: dict[str, list[Case]] = {}


def _start(cache: str, choice: Choice) -> None:
    global _choice
    _choice = choice
    triton.knobs.cache.dir = cache


def _compile(task: tuple[str, int]) -> Found:
    family, n = task
    if family not in _cases:
        _cases[family] = cases(family, _choice)
    before = _cpu_seconds()
    try:
        code = compiled(_cases[family][n].launch, family)
    except Exception as error:  # whatever a compiler may throw is a finding
        return Found(None, f"{type(error).__name__}: {error}", _cpu_seconds() - before)
    seconds = _cpu_seconds() - before
    return Found(facts.read(code, family), "", seconds)


def _cpu_seconds() -> float:
    """Of this process and the compilers it has started."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _judged(family: str, results: dict[int, Found], launches: dict[int, list[Case]]) -> Report:
    rows, timed = [], []
    for n, found in results.items():
        case = launches[n][0]
        if found.facts is None:
            own = [Gate("compiles", False, found.error)]
        else:
            own = gates.of_code(found.facts, work_of(case.launch), case, family)
            timed += [(each, found.facts) for each in launches[n]]
        rows.append(Row(family, case, found, own))
    common = []
    if family == HOME:
        common = gates.of_times(timed)
        common.append(
            gates.of_compilation(sum(r.found.cpu_seconds for r in rows if r.case.production))
        )
    return Report(family, rows, common)


COLUMNS = (
    "kernel", "dtype", "shapes of", "tile", "regs", "spill B", "shared B", "CTAs/SM",
    "products", "16 B loads", "float atomics",
)  # fmt: skip
TIMES = ("tensor ms", "bytes ms", "simulated ms", "limit")


def _cells(row: Row) -> list[str]:
    case, code = row.case, row.found.facts
    cells = [name_of(case.launch), _dtype(case), case.shape, _tile(case)]
    if code is None:
        return [*cells, "does not compile", *[""] * (len(COLUMNS) - 5 + len(TIMES))]
    work = work_of(case.launch)
    expected = gates.expected_products(code, work)
    if case.dtype == torch.float32:
        expected = 0
    wide, loads = gates.wide_and_all(code, work)
    cells += [
        str(code.registers), str(code.spill_bytes), str(code.shared), str(code.ctas),
        f"{code.products:.0f}/{expected:.0f}" if work.products else "",
        f"{wide}/{loads}", str(code.float_atomics),
    ]  # fmt: skip
    if row.family != HOME:
        return cells
    times = gates.predicted(code, work)
    return [
        *cells,
        f"{times.tensor:.3f}" if work.products else "",
        f"{times.memory:.3f}",
        f"{times.simulated:.3f}",
        "bytes" if times.memory >= times.simulated else "instructions",
    ]


def _tile(case: Case) -> str:
    options = case.launch.options
    names = ("ROWS", "BLOCK")
    sizes = [str(v) for k, v in options.items() if k.startswith(names)]
    stages = f" s{options['num_stages']}" if "num_stages" in options else ""
    return f"{'x'.join(sizes)} w{options.get('num_warps', 4)}{stages}".lstrip()


def _dtype(case: Case) -> str:
    return {dtype: name for name, dtype in _DTYPES.items()}[case.dtype]


def _table(header: Iterable[str], rows: Iterable[Iterable[str]], markdown: bool) -> str:
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    padded = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in padded)
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _header(command: str, seconds: float, markdown: bool) -> str:
    facts_of_run = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}",
        "seconds": f"{seconds:.0f}",
    }
    lines = "\n".join(f"{name:<13} {value}" for name, value in facts_of_run.items())
    return f"```\n{lines}\n```" if markdown else lines


def _print(reports: list[Report], header: str, markdown: bool) -> None:
    print(header)
    for found in reports:
        columns = COLUMNS + (TIMES if found.family == HOME else ())
        print(f"\n{'### ' if markdown else ''}{found.family}\n")
        print(_table(columns, map(_cells, found.rows), markdown))
        if found.gates:
            print()
            lines = ((g.name, g.found, "passed" if g.passed else "FAILED") for g in found.gates)
            print(_table(("gate", "found", "result"), lines, markdown))


def _as_json(reports: list[Report]) -> dict[str, Any]:
    return {
        "versions": _versions(),
        "failed": [line for found in reports for line in found.failed],
        "families": {found.family: _family_as_json(found) for found in reports},
    }


def _family_as_json(found: Report) -> dict[str, Any]:
    rows = []
    for row in found.rows:
        columns = COLUMNS + (TIMES if row.family == HOME else ())
        rows.append(
            dict(zip(columns, _cells(row), strict=False))
            | {
                "operation": row.case.operation,
                "production": row.case.production,
                "cpu_seconds": round(row.found.cpu_seconds, 2),
                "gates": [gate._asdict() for gate in row.gates],
            }
        )
    return {"rows": rows, "gates": [gate._asdict() for gate in found.gates]}


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastbrain.kernels.report", description=__doc__.split("\n\n")[0]
    )

    def names(allowed: Collection[str]) -> dict[str, Any]:
        def parse(text: str) -> list[str]:
            given = text.split(",")
            if unknown := [name for name in given if name not in allowed]:
                raise argparse.ArgumentTypeError(
                    f"must be among {', '.join(allowed)}, got {', '.join(unknown)}"
                )
            return given

        return {"type": parse, "metavar": "NAMES"}

    parser.add_argument(
        "--arch",
        **names(LIMITS),
        default=_DEFAULT_FAMILIES,
        help=f"card families among {', '.join(LIMITS)}; else {','.join(_DEFAULT_FAMILIES)}",
    )
    parser.add_argument(
        "--operations", **names(OPERATIONS), default=(), help="of the facade; else all"
    )
    parser.add_argument("--shapes", **names(shapes()), default=(), help="as in the table; else all")
    parser.add_argument("--dtypes", **names(_DTYPES), default=(), help="bf16, fp32; else both")
    parser.add_argument("--jobs", type=_jobs, default=os.cpu_count(), help="processes")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--markdown", action="store_true", help="print tables for docs/kernels.md")
    output.add_argument(
        "--simulated", type=Path, metavar="FILE", help="write the planner's data, and nothing else"
    )
    given = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so nothing compiles; unset it")
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "fastbrain.kernels.report", *words])
    if given.simulated:
        write_simulated(given.simulated, given.jobs, command)
        return 0
    start = time.monotonic()
    choice = Choice(given.operations, given.shapes, [_DTYPES[name] for name in given.dtypes])
    # which launches there are is the same for every family
    if not cases(HOME, choice):
        known = dict.fromkeys(case.shape for case in cases(HOME, choice._replace(shapes=())))
        parser.error(
            f"argument --shapes: of {', '.join(given.operations)} must be among "
            f"{', '.join(known)}, got {', '.join(given.shapes)}"
        )
    reports = report(given.arch, choice, given.jobs)
    if given.json:
        print(json.dumps(_as_json(reports), indent=1))
    else:
        _print(reports, _header(command, time.monotonic() - start, given.markdown), given.markdown)
    failed = [line for found in reports for line in found.failed]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
