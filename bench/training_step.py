"""Tokens per second of a training step, fastbrain against its peers, in one process.

    python -m bench.training_step                       both shapes
    python -m bench.training_step --precision both      in FP32 and in mixed precision
    python -m bench.training_step --profile             and where the time goes, on a CPU
    python -m bench.training_step --smoke --profile     all of it in miniature, in seconds

Everything that can differ between two runs is shared: the process, the threads, the batches, and on
a CPU the round. There contenders take turns, and every other round in reverse, so that a machine
that slows down slows them all. A figure is the median of the rounds; the ratio is ours over the
fastest peer's, where the better of our ways counts. The column of cores used tells whether the
machine was free: on a CPU, less than the thread count means that something else was running, and
the run is worth repeating. Where that cannot be had, one thread (OMP_NUM_THREADS=1) and the ratio
by CPU time come closest.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import breakdown, race
from bench.contenders import Contender, random_ids
from bench.line_up import line_up
from bench.machine import machine
from bench.race import Race, Timing
from bench.shapes import CARD, TOY, TRAINING, TrainingShape
from fastbrain.kernels import has_fast_bf16

# ours over the Hugging Face peer on a CPU; the second only where it multiplies BF16
GOALS = {"fp32": {"dense": 0.97, "moe": 1.05}, "bf16": {"dense": 1.10, "moe": 1.40}}
HUGGING_FACE = ("llama", "qwen2-moe")


def main() -> None:
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.profile and device.type == "cuda":
        sys.exit("--profile reads the CPU's profiler and says nothing of a card; leave it out")
    quoted = CARD if device.type == "cuda" else TRAINING
    shapes = TOY if arguments.smoke else quoted
    names = list(shapes) if arguments.shape == "both" else [arguments.shape]
    usual = "bf16" if device.type == "cuda" else "fp32"
    chosen = arguments.precision or usual
    precisions = ["fp32", "bf16"] if chosen == "both" else [chosen]
    command = " ".join(["python -m bench.training_step", *sys.argv[1:]])
    here = {"command": command, **machine()}
    print("\n".join(f"{key:14}{value}" for key, value in here.items()))
    results = [_compare(shapes[name], precisions, device, arguments) for name in names]
    if arguments.json is not None:
        document = {
            "kind": "training step",
            "machine": here,
            "command": command,
            "results": results,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _compare(
    shape: TrainingShape,
    precisions: list[str],
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Race, print and, if asked, profile one shape; returns what the JSON file holds."""
    print(f"\n{shape}")
    batches = random_ids(shape)
    run = race.in_turns if device.type == "cpu" else race.one_by_one
    entries = line_up(shape, precisions, device)
    raced = run(entries, batches, arguments.rounds, arguments.steps)
    parameters = {t.trainee: t.parameters for t in raced.timings}
    print("parameters:", ", ".join(f"{name} {n:,}" for name, n in parameters.items()))
    _print_rounds(raced.timings)
    result: dict[str, Any] = {
        "shape": str(shape),
        "parameters": parameters,
        "tokens_per_s": {t.label: t.tokens_per_s for t in raced.timings},
        "cores": {t.label: t.cores for t in raced.timings},
        "peak_bytes": {t.label: t.peak_bytes for t in raced.timings if t.peak_bytes},
        "skipped": {each.label: each.reason for each in raced.absent},
        "ratio": {},
    }
    for precision in precisions:
        found = _judge(shape, raced.timings, precision, device)
        if found is None:
            continue
        result["ratio"][precision], pair = found
        if arguments.profile:
            profiles = _profiles(pair, raced, shape, batches)
            result[f"profile {precision}"] = {k: dict(b.groups) for k, b in profiles.items()}
    return result


def _print_rounds(timings: list[Timing]) -> None:
    width = max(len(t.label) for t in timings)
    print(f"{'':{width}}  tokens/s, median and rounds; cores used; peak memory of a card")
    for t in timings:
        each = " ".join(f"{value:8,.0f}" for value in t.tokens_per_s)
        cores = " ".join(f"{value:.2f}" for value in t.cores)
        peak = f"  {t.peak_bytes / 2**20:,.0f} MiB" if t.peak_bytes else ""
        print(f"{t.label:{width}}  {t.median:8,.0f}  ({each})  {cores}{peak}")


def _judge(
    shape: TrainingShape, timings: list[Timing], precision: str, device: torch.device
) -> tuple[dict[str, Any], list[Timing]] | None:
    """Ours against the fastest peer, printed, and the goal against Hugging Face.

    Returns:
        The ratios, and who they are of: ours, the fastest peer, and Hugging Face if it is another.
        None where no peer ran.
    """
    ours = _fastest(t for t in timings if t.ours and t.precision == precision)
    # mixed precision has to beat a peer's better precision
    rivals = [t for t in timings if not t.ours and t.precision in ("fp32", precision)]
    peer = _fastest(iter(rivals))
    if ours is None or peer is None:
        print(f"no peer ran in {precision}, so there is nothing to compare with")
        return None
    ratio = ours.median / peer.median
    by_cpu = ours.median_per_cpu_s / peer.median_per_cpu_s
    found: dict[str, Any] = {"wall": ratio, "cpu": by_cpu, "ours": ours.label, "peer": peer.label}
    print(f"{ours.label} / {peer.label}: {ratio:.3f}")
    if device.type == "cpu":
        print(f"  by CPU time {by_cpu:.3f}")
    pair = [ours, peer]
    library = _fastest(t for t in rivals if t.trainee in HUGGING_FACE)
    if library is not None:
        ratio = ours.median / library.median
        found["hugging_face"] = ratio
        verdict = _verdict(shape, precision, ratio)
        print(f"{ours.label} / {library.label}: {ratio:.3f}, {verdict}")
        pair += [library] if library is not peer else []
    if device.type == "cpu" and any(t.disturbed for t in pair):
        print("  the machine was busy with something else: repeat this before quoting it")
    return found, pair


def _fastest(timings: Iterator[Timing]) -> Timing | None:
    return max(timings, key=lambda t: t.median, default=None)


def _verdict(shape: TrainingShape, precision: str, ratio: float) -> str:
    if shape in CARD.values():
        return "no goal on a card"
    if shape not in TRAINING.values():
        return "a toy shape: no goal"
    if precision == "bf16" and not has_fast_bf16("cpu"):
        return "reported only: this CPU has no BF16 instructions"
    goal = GOALS[precision][shape.name]
    return f"goal {goal:.2f}: {'met' if ratio >= goal else 'missed'}"


def _profiles(
    timings: list[Timing], raced: Race, shape: TrainingShape, batches: Iterator[Tensor]
) -> dict[str, breakdown.Breakdown]:
    """Where the time of these goes, printed side by side."""
    found = {t.label: _profile(raced.field[t.label], shape, batches) for t in timings}
    print(f"\n{breakdown.table(found)}")
    return found


def _profile(
    contender: Contender, shape: TrainingShape, batches: Iterator[Tensor]
) -> breakdown.Breakdown:
    contender.use()
    contender.step(next(batches))
    return breakdown.profile(contender, islice(batches, 2), shape.config.vocab_size)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.training_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=["dense", "moe", "both"], default="both")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "both"],
        help="fp32 on a CPU and bf16 on a card unless given",
    )
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
