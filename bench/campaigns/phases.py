"""In what phase of a start a kill fell, told from the files that it left."""

import os
from pathlib import Path
from typing import NamedTuple

from fastbrain.training import metrics

PHASES = (
    "before the run was there",
    "before the first step of a start",
    "in a step or an evaluation",
    "between a step and its save",
    "in a save",
    "while an old checkpoint was deleted",
    "while another file was replaced",
    "after the last save",
)


class Left(NamedTuple):
    """What a run has on the disk: temporaries, finished steps by its log and its checkpoints."""

    exists: bool
    temporaries: frozenset[str]
    starts: int
    trained: int
    saved: int


def left(run: Path) -> Left:
    """Look at a run that nothing is writing."""
    temporaries = frozenset(str(path.relative_to(run)) for path in run.rglob(".tmp-*"))
    rows = metrics.read(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    steps = [row for row in rows if "loss" in row]
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    saved = [int(name[5:]) for name in names if name[:5] == "step-" and name[5:].isdigit()]
    return Left(
        (run / "config.toml").is_file(),
        temporaries,
        max((row["start"] for row in steps), default=0),
        max((row["step"] for row in steps), default=0),
        max(saved, default=0),
    )


def phase(before: Left, now: Left, steps: int) -> str:
    """Which of `PHASES` a start was in that found `before`, left `now`, and was to do `steps`."""
    new = now.temporaries - before.temporaries
    parts = {Path(each).parts[-1] for each in new}
    if not now.exists:
        return PHASES[0]
    if any(name.startswith(".tmp-step-") for name in parts):
        return PHASES[4]
    if any(name.startswith(".tmp-del-") for name in parts):
        return PHASES[5]
    if parts:
        return PHASES[6]
    if now.saved == steps:
        return PHASES[7]
    if now.starts == before.starts:
        return PHASES[1]
    return PHASES[3] if now.trained > now.saved else PHASES[2]
