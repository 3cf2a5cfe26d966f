"""How ranks other than the first come to know what it was asked for and has looked up.

The first one alone reads the command line's consequences off the disk: it holds the lock, verifies
checkpoints, renames damaged ones. It tells the others in a JSON document.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastbrain.errors import InvalidConfig
from fastbrain.parallel.ranks import Ranks
from fastbrain.training import guard_log
from fastbrain.training.command import Asked, GoingOn, Request
from fastbrain.training.run_dir import Checkpoint, RunDir
from fastbrain.training.settings import Settings


def heard(ranks: Ranks, asked: Asked) -> Request | int:
    """The request that the first rank has, or the exit code that it was refused with, on all.

    Raises:
        InvalidConfig: this rank does not see the run's directory.
    """
    if ranks.size > 1:
        told = ranks.first(lambda: _document(asked))
        if not ranks.leads:
            return int(told["refused"]) if "refused" in told else _request(told)
    if asked.request is not None:
        return asked.request
    assert asked.refused is not None
    return asked.refused


def open_run(path: Path) -> RunDir:
    """Open a run that the first rank has at `path`.

    Raises:
        InvalidConfig: this rank does not see it.
    """
    require_seen(path / "config.toml", path)
    return RunDir.open(path)


def require_seen(made: Path, run: Path) -> None:
    """Refuse to go on where this rank does not see what the first one has `made` in the run.

    Raises:
        InvalidConfig: names the directory.
    """
    if not made.exists():
        raise InvalidConfig(
            f"{socket.gethostname()} does not see the run at {run} that the first process has: "
            "the run's directory must lie where all machines see it under one name, as on a "
            "network file system"
        )


def rollbacks(run: RunDir, ranks: Ranks) -> list[tuple[int, int]]:
    """Those decided up to now, as of `guard_log.rollbacks`, on all ranks."""
    found = ranks.first(lambda: guard_log.rollbacks(run.guard_log))
    return [(first, count) for first, count in found]


def newest(run: RunDir, ranks: Ranks, warn: Callable[[str], object]) -> Checkpoint | None:
    """The newest intact checkpoint, which the first rank finds as `RunDir.newest`, on all."""

    def look() -> int | None:
        checkpoint = run.newest(warn)
        return None if checkpoint is None else checkpoint.step

    step = ranks.first(look)
    return None if step is None else run.checkpoint(step)


def _document(asked: Asked) -> dict[str, Any]:
    request = asked.request
    if request is None:
        return {"refused": asked.refused}
    found: dict[str, Any] = {
        "path": str(request.path.absolute()),
        "settings": request.settings.tables(),
        "going_on": None,
    }
    if (going_on := request.going_on) is not None:
        checkpoint = going_on.checkpoint
        found["going_on"] = {
            "checkpoint": None if checkpoint is None else checkpoint.step,
            "then": going_on.then.tables(),
            "overriding": going_on.overriding,
            "overridden": sorted(going_on.overridden),
            "remake_data": going_on.remake_data,
        }
    return found


def _request(told: dict[str, Any]) -> Request:
    path, going_on = Path(told["path"]), None
    if (found := told["going_on"]) is not None:
        run, step = open_run(path), found["checkpoint"]
        going_on = GoingOn(
            run,
            None if step is None else run.checkpoint(step),
            Settings.from_tables(found["then"]),
            found["overriding"],
            frozenset(found["overridden"]),
            found["remake_data"],
        )
    return Request(path, None, Settings.from_tables(told["settings"]), going_on, False)
