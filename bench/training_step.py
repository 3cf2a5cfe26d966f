"""Tokens per second of a training step, fastbrain against its peer, interleaved in one process.

    python -m bench.training_step                       both shapes in FP32
    python -m bench.training_step --precision both      and mixed precision
    python -m bench.training_step --profile             and where the time goes
    python -m bench.training_step --smoke --profile     all of it in miniature, in seconds

Everything that can differ between two runs is shared: the process, the threads, the batches, the
round. Contenders take turns, and every other round in reverse, so that a machine that slows down
slows them all. A figure is the median of the rounds; the ratio is ours over the fastest peer's. The
column of cores used tells whether the machine was free: less than the thread count means that
something else was running, and the run is worth repeating. Where that cannot be had, one thread
(OMP_NUM_THREADS=1) and the ratio by CPU time come closest.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import breakdown, peers
from bench.contenders import Contender, contenders, random_ids
from bench.shapes import TOY, TRAINING, TrainingShape
from fastbrain.kernels import has_fast_bf16

# ours over the peer; the second only where the CPU multiplies BF16
GOALS = {"fp32": {"dense": 0.97, "moe": 1.05}, "bf16": {"dense": 1.10, "moe": 1.40}}


@dataclass(frozen=True)
class Timing:
    """One contender's rounds: tokens per wall-clock second, and CPU seconds per wall second."""

    tokens_per_s: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def disturbed(self) -> bool:
        """Whether something else had a tenth of the processor in any round."""
        return min(self.cores) < 0.9 * torch.get_num_threads()

    @property
    def median_per_cpu_s(self) -> float:
        """Tokens per CPU second, which waiting for a busy core costs nothing of."""
        rates = zip(self.tokens_per_s, self.cores, strict=True)
        return statistics.median(rate / cores for rate, cores in rates)


Timings = dict[Contender, Timing]


def main() -> None:
    arguments = _arguments()
    if not peers.available():
        sys.exit(peers.MISSING)
    shapes = TOY if arguments.smoke else TRAINING
    names = list(shapes) if arguments.shape == "both" else [arguments.shape]
    precisions = ["fp32", "bf16"] if arguments.precision == "both" else [arguments.precision]
    machine = _machine()
    print("\n".join(f"{key:14}{value}" for key, value in machine.items()))
    results = [_compare(shapes[name], precisions, arguments) for name in names]
    if arguments.json is not None:
        document = {"machine": machine, "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _compare(
    shape: TrainingShape, precisions: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Race, print and, if asked, profile one shape; returns what the JSON file holds."""
    print(f"\n{shape}")
    batches = random_ids(shape)
    field = _line_up(shape, precisions, batches)
    parameters = {c.trainee.name: c.trainee.parameters() for c in field}
    print("parameters:", ", ".join(f"{name} {n:,}" for name, n in parameters.items()))
    timings = _race(field, shape, batches, arguments.rounds, arguments.steps)
    result: dict[str, Any] = {
        "shape": str(shape),
        "parameters": parameters,
        "tokens_per_s": {c.label: t.tokens_per_s for c, t in timings.items()},
        "cores": {c.label: t.cores for c, t in timings.items()},
        "ratio": {},
    }
    for precision in precisions:
        ours, peer = _final(timings, precision)
        ratio = timings[ours].median / timings[peer].median
        by_cpu = timings[ours].median_per_cpu_s / timings[peer].median_per_cpu_s
        result["ratio"][precision] = {"wall": ratio, "cpu": by_cpu}
        print(f"{ours.label} / {peer.label}: {ratio:.3f}, {_verdict(shape, precision, ratio)}")
        print(f"  by CPU time {by_cpu:.3f}")
        if timings[ours].disturbed or timings[peer].disturbed:
            print("  the machine was busy with something else: repeat this before quoting it")
        if arguments.profile:
            pair = {c.label: _profile(c, shape, batches) for c in (ours, peer)}
            result[f"profile {precision}"] = {k: dict(b.groups) for k, b in pair.items()}
            print(f"\n{breakdown.table(pair)}")
    return result


def _line_up(
    shape: TrainingShape, precisions: list[str], batches: Iterator[Tensor]
) -> list[Contender]:
    """The contenders that run here, each warmed up."""
    field = []
    for contender, reason in contenders(shape, precisions):
        if reason is None:
            reason = _warm_up(contender, batches)
        if reason is None:
            field.append(contender)
        else:
            print(f"left out: {contender.label} ({reason})")
    return field


def _warm_up(contender: Contender, batches: Iterator[Tensor]) -> str | None:
    """Take two steps: the first allocates moments, and fresh memory is slow for longer than one.

    Returns:
        Why the contender cannot run, where that is one of a peer's options refusing; else None.
    """
    try:
        contender.use()
        for ids in islice(batches, 2):
            contender.step(ids)
    except Exception as error:
        if contender.experts is None:
            raise
        return str(error).splitlines()[0]
    return None


def _race(
    field: list[Contender],
    shape: TrainingShape,
    batches: Iterator[Tensor],
    rounds: int,
    steps: int,
) -> Timings:
    width = max(len(c.label) for c in field)
    print(f"{'':{width}}  tokens/s, median and rounds; cores used")
    timings: Timings = {contender: Timing() for contender in field}
    for turn in range(rounds):
        data = list(islice(batches, steps))
        for contender in field if turn % 2 == 0 else reversed(field):
            contender.use()
            wall, cpu = time.perf_counter(), time.process_time()
            for ids in data:
                contender.step(ids)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            timings[contender].tokens_per_s.append(steps * shape.tokens / wall)
            timings[contender].cores.append(cpu / wall)
    for contender, timing in timings.items():
        each = " ".join(f"{value:8,.0f}" for value in timing.tokens_per_s)
        cores = " ".join(f"{value:.2f}" for value in timing.cores)
        print(f"{contender.label:{width}}  {timing.median:8,.0f}  ({each})  {cores}")
    return timings


def _final(timings: Timings, precision: str) -> tuple[Contender, Contender]:
    """Ours in this precision, and the fastest peer that it is held against."""
    ours = next(c for c in timings if c.ours and c.precision == precision)
    rivals = [c for c in timings if not c.ours and c.precision in ("fp32", precision)]
    return ours, max(rivals, key=lambda c: timings[c].median)


def _verdict(shape: TrainingShape, precision: str, ratio: float) -> str:
    if shape not in TRAINING.values():
        return "a toy shape: no goal"
    if precision == "bf16" and not has_fast_bf16("cpu"):
        return "reported only: this CPU has no BF16 instructions"
    goal = GOALS[precision][shape.name]
    return f"goal {goal:.2f}: {'met' if ratio >= goal else 'missed'}"


def _profile(
    contender: Contender, shape: TrainingShape, batches: Iterator[Tensor]
) -> breakdown.Breakdown:
    contender.use()
    contender.step(next(batches))
    return breakdown.profile(contender, islice(batches, 2), shape.config.vocab_size)


def _machine() -> dict[str, str]:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    bf16 = "with" if has_fast_bf16("cpu") else "without"
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", platform.processor())
    return {
        "command": "python -m bench.training_step " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit or "none",
        "cpu": f"{cpu}, {torch.get_num_threads()} threads, {bf16} BF16 instructions",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.training_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=["dense", "moe", "both"], default="both")
    parser.add_argument("--precision", choices=["fp32", "bf16", "both"], default="fp32")
    parser.add_argument("--rounds", type=_count, default=3, help="turns of each contender")
    parser.add_argument("--steps", type=_count, default=2, help="training steps in a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    parser.add_argument("--smoke", action="store_true", help="toy shapes: does it all run?")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


if __name__ == "__main__":
    main()
