"""One rank of `python -m bench.scaling`, which starts it by torchrun: trains a shape, timed."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

from bench.contenders import random_ids
from bench.scaling import NO_CARDS, PARALLEL, REFUSED, add_turns
from bench.shapes import CARD, LEARNING_RATE, MAX_NORM, TOY, TrainingShape
from fastbrain import Optimizer, TokenBatch, TransformerLm
from fastbrain.errors import FastBrainError
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks

# kernels compile, DDP lays out its buckets anew and NCCL connects in the first
WARM_UP_STEPS = 3


def main() -> int:
    """Take part, as the command line and torchrun's environment say; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling_rank", description=__doc__)
    parser.add_argument("--shape", choices=list(CARD), required=True)
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="nothing to one rank")
    parser.add_argument("--out", type=Path, required=True, help="where the first rank writes")
    add_turns(parser)
    options = parser.parse_args()
    # before anything is waited for: a rank that refuses alone would leave the others waiting
    if not torch.cuda.is_available():
        print(f"bench.scaling: {NO_CARDS}", file=sys.stderr)
        return REFUSED
    shape = (TOY if options.smoke else CARD)[options.shape]
    try:
        ranks = Ranks.join(Launch.find())
        model = trained(shape, ranks, options.parallel, options.precision)
        step = stepper(model, shape, ranks)
        rates = tokens_per_s(step, shape, ranks, options.rounds, options.steps)
        peak = ranks.highest(torch.cuda.max_memory_allocated())
    except FastBrainError as error:
        print(f"bench.scaling: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if ranks.leads:
        options.out.write_text(json.dumps({"tokens_per_s": rates, "peak_bytes": peak}))
    ranks.leave()
    return 0


def trained(shape: TrainingShape, ranks: Ranks, parallel: str, precision: str) -> TransformerLm:
    """The model that the ranks train, the same on all of them."""
    builder = TransformerLm.builder().config(shape.config).seed(0)
    builder = builder.mixed_precision(precision == "bf16").optimizer(Optimizer.adam(LEARNING_RATE))
    model = builder.build()
    model.distribute(ranks, parallel)
    return model


def stepper(model: TransformerLm, shape: TrainingShape, ranks: Ranks) -> Callable[[], None]:
    """A training step of this rank's rows, as the training program takes it.

    Rows are other ones in each step and on each rank; they are made before, so that no step waits.
    """
    ids = list(islice(random_ids(shape, seed=ranks.rank), 8))
    at = 0

    def step() -> None:
        nonlocal at
        # a batch of its own for every step, because a batch remembers its targets
        batch = TokenBatch(list(ids[at % len(ids)]))
        at += 1
        model.zero_grad()
        model.accumulate_step(batch, weight=1 / ranks.size)
        model.step_clipped(1.0, MAX_NORM)

    return step


def tokens_per_s(
    step: Callable[[], None],
    shape: TrainingShape,
    ranks: Ranks,
    rounds: int,
    steps: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[float]:
    """Of all ranks, by round; a round is as long as the slowest of them takes.

    Args:
        step: takes one.
        shape: whose rows every rank trains.
        ranks: that train.
        rounds: that are timed.
        steps: of a round.
        clock: in nanoseconds.
    """
    for _ in range(WARM_UP_STEPS):
        step()
    rates = []
    for _ in range(rounds):
        _finish(ranks)
        start = clock()
        for _ in range(steps):
            step()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        nanoseconds = ranks.highest(clock() - start)
        rates.append(1e9 * steps * ranks.size * shape.tokens / nanoseconds)
    return rates


def _finish(ranks: Ranks) -> None:
    """Wait until all ranks have done what they were told."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ranks.barrier()


if __name__ == "__main__":
    sys.exit(main())
