"""Tokens per second of 1, 2, 4 .. cards that train together, replicated (DDP) and cut up (FSDP2).

    python -m bench.scaling                       both shapes, on all cards of this machine
    python -m bench.scaling --shape dense --json FILE
    python -m bench.scaling --smoke               all of it in miniature: does it run?

Every number of ranks is a start of torchrun of its own, and every rank has as many rows as one
alone, so that a step of twice the ranks has twice the tokens. Efficiency is the tokens per second
of W ranks over W times those of one, which trains without any of torch.distributed.

It needs two cards. On CPUs it times nothing: there gloo copies within one memory, which says
nothing of cards and the links between them.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from bench.shapes import CARD, TOY, TrainingShape

DONE, FAILED, REFUSED = 0, 1, 2
KIND = "scaling"
PARALLEL = ("ddp", "fsdp")
NO_CARDS = (
    "this machine has no card that PyTorch can use, and CPUs are not timed: gloo on one machine "
    "copies within its memory, which says nothing of cards and the links between them"
)
_ROOT = Path(__file__).parents[1]
_MIB = 2**20

Launch = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Run:
    """One start of torchrun that went well.

    Attributes:
        ranks: processes, a card each.
        parallel: "ddp" or "fsdp"; "alone" of one rank.
        tokens_per_s: of all ranks, by round.
        peak_bytes: that tensors took of the card that was fullest.
        efficiency: see the module; None where one rank alone could not be timed.
    """

    ranks: int
    parallel: str
    tokens_per_s: list[float]
    peak_bytes: int
    efficiency: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


@dataclass(frozen=True)
class Failure:
    """One that did not, and what it said last."""

    ranks: int
    parallel: str
    why: str


def main(
    arguments: Sequence[str] | None = None,
    cards: Callable[[], int] | None = None,
    launch: Launch | None = None,
) -> int:
    """Run the command line; returns 0 measured, 1 something failed, 2 refused.

    Args:
        arguments: the words of the command line; those of the process by default.
        cards: says how many there are; PyTorch unless given.
        launch: runs a command; a subprocess unless given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    count = (cards or torch.cuda.device_count)()
    refusal = refused(count)
    if refusal is not None:
        print(f"bench.scaling: {refusal}", file=sys.stderr)
        return REFUSED
    command = shlex.join(["python", "-m", "bench.scaling", *words])
    here = {"command": command, **machine(), "cards": str(count)}
    print("\n".join(f"{key:14}{value}" for key, value in here.items()), flush=True)
    shapes = TOY if options.smoke else CARD
    names = list(shapes) if options.shape == "both" else [options.shape]
    results, failed = [], False
    for name in names:
        runs, failures = measured(shapes[name], count, options, launch or _launch)
        failed = failed or bool(failures)
        results.append(
            {
                "shape": str(shapes[name]),
                "precision": options.precision,
                "steps": options.steps,
                "runs": [asdict(each) | {"ms_per_step": ms(each, shapes[name])} for each in runs],
                "failed": [asdict(each) for each in failures],
            }
        )
    if options.json is not None:
        document = {"kind": KIND, "machine": here, "command": command, "results": results}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return FAILED if failed else DONE


def refused(cards: int) -> str | None:
    """Why so many cards cannot be timed; None where they can."""
    if cards == 0:
        return NO_CARDS
    if cards == 1:
        return (
            "this machine has one card, and scaling is measured on two at least; one card is timed "
            "by python -m bench.training_step"
        )
    return None


def rank_counts(cards: int) -> list[int]:
    """1, 2, 4 .. and all of the cards."""
    return sorted({2**power for power in range(cards.bit_length())} | {cards})


def measured(
    shape: TrainingShape, cards: int, options: argparse.Namespace, launch: Launch
) -> tuple[list[Run], list[Failure]]:
    """Every start of one shape, each printed as it ends."""
    print(f"\n{shape}\n{_header()}", flush=True)
    runs, failures = list[Run](), list[Failure]()
    alone = None
    for ranks, parallel in _starts(cards):
        found = _started(shape, ranks, parallel, options, launch)
        if isinstance(found, Failure):
            failures.append(found)
            print(f"{ranks:5}  {parallel:8}  FAILED: {found.why}", flush=True)
            continue
        alone = found.median if ranks == 1 else alone
        run = with_efficiency(found, alone)
        runs.append(run)
        print(_line(run, shape), flush=True)
    return runs, failures


def with_efficiency(run: Run, alone: float | None) -> Run:
    """A run, and how it compares with one rank of so many tokens per second."""
    if alone is None:
        return run
    efficiency = run.median / (run.ranks * alone)
    return Run(run.ranks, run.parallel, run.tokens_per_s, run.peak_bytes, efficiency)


def ms(run: Run, shape: TrainingShape) -> float:
    """Milliseconds of a step of all ranks, each with the rows of the shape."""
    return 1e3 * run.ranks * shape.tokens / run.median


def _starts(cards: int) -> Iterator[tuple[int, str]]:
    for ranks in rank_counts(cards):
        yield from [(ranks, each) for each in PARALLEL] if ranks > 1 else [(1, "alone")]


def _started(
    shape: TrainingShape, ranks: int, parallel: str, options: argparse.Namespace, launch: Launch
) -> Run | Failure:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        words = ["--shape", shape.name, "--precision", options.precision, "--out", str(out)]
        words += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        words += ["--parallel", parallel] if ranks > 1 else []
        words += ["--smoke"] if options.smoke else []
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = launch([sys.executable, *torchrun, "-m", "bench.scaling_rank", *words])
        if done.returncode or not out.is_file():
            return Failure(ranks, parallel, _last_words(done))
        found: dict[str, Any] = json.loads(out.read_text())
    return Run(ranks, parallel, found["tokens_per_s"], found["peak_bytes"])


def _launch(command: list[str]) -> "subprocess.CompletedProcess[str]":
    # the ranks share the machine's cores; torchrun would set one thread, with a warning
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=_ROOT, env=environment
    )


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    """What a rank said, which torchrun buries in its own account of the failure."""
    lines = [each.strip() for each in done.stderr.splitlines() if each.strip()]
    own = [each for each in lines if each.startswith("bench.scaling: ")]
    errors = [each for each in lines if "Error: " in each and not each.startswith("torch.dist")]
    # the others only say that this one is gone
    own.sort(key=lambda each: "another rank" in each)
    said = (own or errors[-1:] or lines[-1:] or [f"exit code {done.returncode}"])[0]
    return said.removeprefix("bench.scaling: ")


def _header() -> str:
    return f"{'ranks':>5}  {'':8}{'tokens/s':>12}{'ms/step':>10}{'efficiency':>12}{'peak MiB':>10}"


def _line(run: Run, shape: TrainingShape) -> str:
    efficiency = "" if run.efficiency is None else f"{run.efficiency:.1%}"
    return (
        f"{run.ranks:5}  {run.parallel:8}{run.median:12,.0f}{ms(run, shape):10,.1f}"
        f"{efficiency:>12}{run.peak_bytes / _MIB:10,.0f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=["dense", "moe", "both"], default="both")
    add_turns(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Give a parser what the ranks are told, too."""
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=_count, default=5, help="timed turns (5)")
    parser.add_argument("--steps", type=_count, default=10, help="training steps in a turn (10)")
    parser.add_argument("--smoke", action="store_true", help="toy shapes: does it all run?")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
