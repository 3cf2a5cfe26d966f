"""What safety costs: the stall of a save, the speed of verifying, and that of the whole program.

    python -m bench.campaigns.saving --out bench/results/saving.json

On the shipped 30m model with short rows, so that a CPU has many steps in a minute. The bare loop
is the public interface and nothing else; the program is `fastbrain train` without its command
line. The two take turns, step by step, on models of their own, so that a machine that speeds up or
slows down does so for both.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.results import write
from fastbrain.tokens import TokenFile
from fastbrain.training import config_files, manifest, program
from fastbrain.training.lock import Lock
from fastbrain.training.loop import Trainer
from fastbrain.training.progress import Console
from fastbrain.training.saving import Saver

ROWS, SEQ_LEN, VOCAB = 4, 64, 4_096
# the published promise is for a save this often; the default is every 15 minutes
INTERVAL_S = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=60, help="steps of each contender")
    parser.add_argument("--saves", type=int, default=7, help="saves of each kind")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="saving-") as folder:
        found = measured(Path(folder), options.steps, options.saves)
    for key, value in found.items():
        print(f"{key:28} {value:.6g}" if isinstance(value, float) else f"{key:28} {value}")
    if options.out:
        write(options.out, "saving", found)
    return 0


def measured(folder: Path, steps: int, saves: int) -> dict[str, Any]:
    """All figures; seconds, bytes, and ratios as their names say."""
    trainer, bare = trained(folder / "run"), trained(folder / "bare")
    found = {"parameters": trainer.model.parameter_counts().total}
    found |= saving(trainer, saves)
    directory = trainer.run_dir.checkpoints()[-1].path
    size = sum(path.stat().st_size for path in directory.iterdir())
    taken = [
        timed(lambda: manifest.fault(directory, trainer.run_dir.run_id, trainer.state.step))
        for _ in range(saves)
    ]
    found |= {"checkpoint_bytes": size, "verify_gb_per_s": size / 1e9 / statistics.median(taken)}
    return found | overhead(trainer, bare, steps)


def trained(path: Path) -> Trainer:
    """A run of the 30m model on random ids, after a few steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus = path.parent / "corpus.bin"
    if not corpus.exists():
        TokenFile.write(corpus, np.random.default_rng(0).integers(0, VOCAB, 200_000))
    settings = config_files.load("30m", [
        f"data.train={corpus}", f"data.seq_len={SEQ_LEN}", f"model.vocab_size={VOCAB}",
        f"train.global_batch_size={ROWS}", "train.max_steps=100000", "save.interval_min=15",
        "eval.interval=1000000",
    ])  # fmt: skip
    trainer = program.begin(path, Lock.acquire(path), settings, Console(sys.stderr))
    for _ in range(4):
        one_step(trainer)
    return trainer


def one_step(trainer: Trainer) -> None:
    """A step as the program does it, with everything that watches."""
    trainer._train_step()
    trainer._after_step(wanted=False)


def saving(trainer: Trainer, saves: int) -> dict[str, float]:
    """How long a save takes in line, and how long training stands still for one in a thread."""
    in_line, stalls = [], []
    saver = Saver(print)
    trainer._writing()()  # the host copy is allocated, the disk is warm
    for _ in range(saves):
        one_step(trainer)
        in_line.append(timed(lambda: trainer._writing()()))
        one_step(trainer)
        stalls.append(timed(lambda: saver.start(trainer._writing())))
        saver.wait()
    in_line_s, stall_s = statistics.median(in_line), statistics.median(stalls)
    return {
        "save_in_line_s": in_line_s,
        "stall_s": stall_s,
        "stall_worst_s": max(stalls),
        "stall_to_in_line": stall_s / in_line_s,
        f"stall_share_every_{INTERVAL_S}_s": stall_s / INTERVAL_S,
    }


def overhead(trainer: Trainer, bare: Trainer, steps: int) -> dict[str, float]:
    """The speed of the program as a share of the bare loop's, and steps while a save is written."""
    with trainer._watchdog:
        pairs = []
        for _ in range(steps):
            ours = timed(lambda: one_step(trainer))
            theirs = timed(lambda: bare_step(bare))
            pairs.append((ours, theirs))
        saver, busy = Saver(print), []
        saver.start(trainer._writing())
        while saver._thread is not None and saver._thread.is_alive():
            busy.append(timed(lambda: one_step(trainer)))
        saver.wait()
    ours_s = statistics.median(each for each, _ in pairs)
    return {
        "bare_step_s": statistics.median(each for _, each in pairs),
        "program_step_s": ours_s,
        "program_to_bare_speed": statistics.median(theirs / ours for ours, theirs in pairs),
        "step_while_saving_s": statistics.median(busy) if busy else float("nan"),
    }


def bare_step(trainer: Trainer) -> None:
    """The same step by the public interface alone: nothing is judged, logged or saved."""
    model, settings = trainer.model, trainer.settings
    step = trainer.state.step
    model.set_learning_rate(settings.schedule().rate(step))
    micro = int(settings.train.micro_batch_size)
    for batch in trainer.corpus.step_batches(step, ROWS, micro):
        losses = model.accumulate_step(batch, weight=micro / ROWS)
    model.step_clipped(1.0, settings.train.max_norm)
    float(losses.lm_loss)
    trainer.state.step = step + 1


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


if __name__ == "__main__":
    sys.exit(main())
