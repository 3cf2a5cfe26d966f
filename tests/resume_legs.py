"""Legs of runs for test_resume.py, as functions and, for the resumed ones, as a program."""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
from models import SHAPES, model

from fastbrain import Optimizer, Schedule, TokenFile, TransformerLm

CASES = {
    f"{shape}-{precision}-{'4-clipped' if clip else '1'}": (shape, precision, accumulate, clip)
    for shape in SHAPES
    for precision in ("f32", "bf16")
    for accumulate, clip in ((1, None), (4, 0.5))
}


def leg(name: str, folder: Path, steps: range, load: str | None, save: str) -> list[object]:
    """Trains some steps of a case; returns each step's batch digest, rate, losses and norm."""
    shape, precision, accumulate, clip = CASES[name]
    if load is None:
        lm = model(SHAPES[shape], Optimizer.adam(1e-2, weight_decay=0.1))
    else:
        lm = TransformerLm.load_bin(folder / f"{name}-{load}.rbw")
        lm.load_optimizer_state(folder / f"{name}-{load}.opt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that BF16 is slow here
        lm.set_mixed_precision(precision == "bf16")
    schedule = Schedule.warmup_cosine(1e-2, 3, 8)
    tokens = TokenFile.open(folder / "corpus.bin", 42)
    rows: list[object] = []
    for step in steps:
        rate = schedule.rate(step)
        lm.optimizer.set_learning_rate(rate)
        seen, losses = hashlib.sha256(), []
        for micro in range(accumulate):
            batch = tokens.batch(step * accumulate + micro, 4, 16)
            seen.update(batch.ids.numpy().tobytes())
            total = lm.accumulate_step(batch)
            losses += [float(total.lm_loss).hex(), float(total.auxiliary_loss).hex()]
        norm = lm.grad_norm()
        if clip is None:
            lm.step(1 / accumulate)
        else:
            norm = lm.step_clipped(1 / accumulate, clip)
        rows.append([seen.hexdigest(), rate, losses, float(norm).hex()])
    lm.save_bin(folder / f"{name}-{save}.rbw")
    lm.save_optimizer_state(folder / f"{name}-{save}.opt")
    return rows


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(int(sys.argv[2]))
    resumed = {
        name: leg(name, Path(sys.argv[1]), range(4, 8), load="half", save="resumed")
        for name in CASES
    }
    print(json.dumps(resumed))
