"""What ranks do in tests of what goes wrong on one of them; see `ranks.together`."""

import dataclasses
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench.campaigns import shim
from fastbrain import TransformerLm, atomic, cli, lm
from fastbrain.parallel import ranks, replicas
from fastbrain.training import data, evaluation, loop, snapshot
from fastbrain.training.loop import Trainer
from fastbrain.training.progress import Pace
from fastbrain.training.snapshot import Camera, Snapshot
from fastbrain.transformer import Block

# where something may happen to a rank: before a call of one of these
PLACES: dict[str, tuple[Any, str]] = {
    "data": (data, "make"),
    "corpus": (data, "open_corpus"),
    "distribute": (TransformerLm, "distribute"),
    "step": (Trainer, "_train_step"),
    "forward": (lm, "batch_losses"),
    "block": (Block, "forward"),
    "bucket": (replicas, "_sum"),
    "exchange": (loop, "exchanged"),
    "update": (TransformerLm, "step_clipped"),
    "take": (Camera, "take"),
    "gather": (snapshot, "whole"),
    "write": (Snapshot, "write"),
    "evaluate": (TransformerLm, "evaluate"),
    "gathered": (TransformerLm, "gathered"),
    "samples": (evaluation, "write_samples"),
    "conclude": (loop, "conclude"),
}
# a rank, a place, how many calls go well there before, and what happens then
Fault = tuple[int, str, int, str]


def program(words: list[str], faults: Sequence[Fault] = (), patience_s: float = 20.0) -> int:
    """Do what a command line of `fastbrain` says; the exit code.

    What a rank leaves in the working directory: `hit-RANK`, when a fault came, and `left-RANK`,
    when it was through, both in seconds of one clock.
    """
    rank = int(os.environ.get("RANK", "0"))
    # one collective in some hundreds does not hear of a death, and waits for as long as it may
    ranks.STEP_PATIENCE = ranks.PAUSE_PATIENCE = timedelta(seconds=patience_s)
    for number, place, calls, act in faults:
        if number == rank and place == "operation":
            die_at_operation(calls)
        elif number == rank:
            before(*PLACES[place], calls, functools.partial(befall, rank, act))
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    leave = os._exit

    def note(code: int) -> NoReturn:
        # a rank that fails ends like this, and so does one that the server has forked
        Path(f"left-{rank}").write_text(str(time.monotonic()))
        end_stopped(faults)
        leave(code)

    os._exit = note
    return cli.main(words)


def before(owner: Any, name: str, calls: int, act: Callable[[], None]) -> None:
    """Have `act` called once, when `owner.name` was called so often and is called again."""
    real, left = getattr(owner, name), iter(range(calls, -1, -1))

    @functools.wraps(real)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        if next(left, -1) == 0:
            act()
        return real(*arguments, **keywords)

    setattr(owner, name, counted)


def die_at_operation(number: int) -> None:
    """Be killed at an operation on the disk of this number, counted from the first save on."""
    write, left = Snapshot.write, number

    def count(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        nonlocal left
        if left == 0:
            befall(int(os.environ["RANK"]), "KILL")
        left -= 1
        return real(*arguments)

    @functools.wraps(write)
    def armed(*arguments: Any) -> Any:
        Snapshot.write = write  # type: ignore[method-assign]
        shim.install(count)
        return write(*arguments)

    Snapshot.write = armed  # type: ignore[method-assign]


def befall(rank: int, act: str) -> None:
    """A signal by its name without SIG, a file of the run to make, or an error."""
    Path(f"hit-{rank}").write_text(str(time.monotonic()))
    if act == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if act == "mistake":
        raise ValueError("a mistake of ours")
    if "/" in act:
        Path(act).touch()
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{act}"))


def end_stopped(faults: Sequence[Fault]) -> None:
    """Kill what a fault has stopped, so that nobody waits for it."""
    for rank, _, _, act in faults:
        if act == "STOP":
            with suppress(OSError, ValueError):
                os.kill(int(Path(f"pid-{rank}").read_text()), signal.SIGKILL)


def full_disk(words: list[str], after: int) -> int:
    """`program` where the disk takes no checkpoint of a step after this one."""
    real = atomic.open

    def refuse(path: atomic.StrPath) -> int:
        step = re.search(r"checkpoints/\.tmp-step-(\d+)-", str(path))
        if step is not None and int(step[1]) > after:
            raise OSError(28, os.strerror(28))
        return real(path)

    atomic.open = refuse
    return program(words)


def poisoned(words: list[str], rank: int, calls: list[int]) -> int:
    """`program` where some micro-batches of one rank, counted from 0, have gradients of NaN."""
    real, numbers = lm.batch_losses, iter(range(10_000))

    def poison(*arguments: Any) -> Any:
        losses = real(*arguments)
        if next(numbers) in calls and int(os.environ["RANK"]) == rank:
            # what is summed and logged stays a number
            return dataclasses.replace(losses, lm_loss=losses.lm_loss * float("nan"))
        return losses

    lm.batch_losses = poison
    return program(words)


def hurried(words: list[str], rank: int, times: float) -> int:
    """`program` where the clock of one rank runs so many times as fast."""
    if int(os.environ["RANK"]) == rank:
        elapsed_s = Pace.elapsed_s
        Pace.elapsed_s = lambda pace: times * elapsed_s(pace)  # type: ignore[method-assign]
    return program(words)


def blind(words: list[str], rank: int, run: str) -> int:
    """`program` where one rank does not see what is in the run's directory."""
    if int(os.environ["RANK"]) == rank:
        exists, hidden = Path.exists, Path(run).absolute()
        Path.exists = lambda path: (  # type: ignore[method-assign,assignment]
            hidden not in path.absolute().parents and exists(path)
        )
    return program(words)


def words(name: str, *more: str, parallel: str = "ddp") -> list[str]:
    """The command line of a run that two ranks can share, and four."""
    shared = (f"train.parallel={parallel}", "train.micro_batch_size=2", "save.interval_steps=2")
    return ["train", "tiny.toml", "--run", name, *shared, *more]


def waited_s(victim: int, survivor: int) -> float:
    """Seconds from what befell one rank to the end of another, in the last `program`."""
    hit, left = Path(f"hit-{victim}"), Path(f"left-{survivor}")
    return float(left.read_text()) - float(hit.read_text())
