"""Runs small enough to be killed a thousand times, and the server that begins one in milliseconds.

This process imports torch once and never runs an operation of it; each start of a run is a fork.
So a start costs what a training program costs after its imports, and begins with the state of a
fresh process.
"""

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastbrain import cli
from fastbrain.tokens import TokenFile
from fastbrain.training import chart, metrics

STEPS = 6

# both kinds of layer, and two micro-batches a step
CONFIG = f"""\
[model]
vocab_size = 61
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 16
d_ff = 48
moe_d_ff = 16
num_experts = 3
experts_per_token = 2
moe_layers = [1]
max_seq_len = 32

[data]
train = "corpus.bin"
seq_len = 16

[train]
max_steps = {STEPS}
global_batch_size = 8
micro_batch_size = 4
learning_rate = 1e-2
max_norm = 0.5

[save]
interval_steps = 1

[eval]
interval = 3
samples = 1
"""

# what a child ends with after an error that is no exit code of fastbrain
CRASHED = 70


class Lost(Exception):
    """A run did not come back as it had to; says which and how."""


class Orphans(Exception):
    """A run came back to the bit, and left temporaries lying about; names them."""


class End(NamedTuple):
    """What a run ended with: the bits of its last checkpoint, its history, its samples."""

    weights: bytes
    moments: bytes
    history: tuple[tuple[object, ...], ...]
    samples: dict[str, bytes]


def lay_out(folder: Path, text: bool = False) -> None:
    """Give a folder the configuration and the corpus, and be in it.

    Args:
        folder: made where it is missing.
        text: have a corpus of text, so that the checkpoints hold a tokenizer too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG
    if text:
        config = config.replace("vocab_size = 61\n", "").replace("corpus.bin", "corpus.txt")
        words = "the quick brown fox jumps over the lazy dog while five wizards box quietly"
        (folder / "corpus.txt").write_text(f"{words}\n" * 200)
    (folder / "tiny.toml").write_text(config)
    ids = np.random.default_rng(0).integers(0, 61, 2_000)
    # something to learn: rows of twenty ids that rise
    TokenFile.write(folder / "corpus.bin", np.sort(ids.reshape(-1, 20), axis=1).reshape(-1))
    os.chdir(folder)
    # what a start would import otherwise, every time
    importlib.import_module("fastbrain.train")
    # seconds of matplotlib in every start, which are no part of what is tried here
    chart.draw = lambda *_: "loss.png is not drawn"
    gc.freeze()


def command(run: Path, *overrides: str) -> list[str]:
    """The command that begins a run, or goes on with it."""
    if (run / "config.toml").is_file():
        return ["resume", str(run)]
    return ["train", "tiny.toml", "--run", str(run), "--resume", "auto", *overrides]


def start(words: Sequence[str], log: Path, first: Callable[[], object] | None = None) -> int:
    """Fork a child that runs `fastbrain WORDS`; returns its process id.

    Args:
        words: of the command line.
        log: what the child prints is appended here.
        first: called in the child before.
    """
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        if first is not None:
            first()
        code = cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a child, minus the signal if one ended it; None if it still runs then."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, 1e-3))


def kill(pid: int) -> int:
    """Kill a child that has not been waited for; the code it ended with, which may be its own."""
    os.kill(pid, 9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish(run: Path, *overrides: str, seconds: float = 60.0) -> float:
    """Begin or go on with a run, undisturbed, to its end; returns the seconds that it took.

    Raises:
        Lost: it did not end with exit code 0 in time.
    """
    log = run.with_suffix(".log")
    began = time.monotonic()
    pid = start(command(run, *overrides), log)
    code = wait(pid, seconds)
    if code is None:
        kill(pid)
        raise Lost(f"{run.name} did not come to its end in {seconds:.0f} s{tail(log)}")
    if code:
        raise Lost(f"{run.name} ended with exit code {code}{tail(log)}")
    return time.monotonic() - began


def end(run: Path) -> End:
    """What a finished run holds."""
    last = max((run / "checkpoints").glob("step-????????"))
    keys = ("step", "loss", "aux_loss", "grad_norm", "learning_rate", "tokens", "val_loss")
    rows = metrics.read(run / "metrics.jsonl")
    return End(
        (last / "model.safetensors").read_bytes(),
        (last / "optimizer.safetensors").read_bytes(),
        tuple(tuple(row.get(key) for key in keys) for row in rows),
        {path.name: path.read_bytes() for path in (run / "samples").glob("*.txt")},
    )


def require_same(run: Path, expected: End) -> None:
    """Check that a run is the run that nothing disturbed, and left nothing lying about.

    Raises:
        Lost: a bit, a row or a sample differs, or a checkpoint was refused.
        Orphans: that apart, a temporary is still there.
    """
    found = end(run)
    for name in ("weights", "moments", "history", "samples"):
        if getattr(found, name) != getattr(expected, name):
            raise Lost(f"{run.name}: its {name} are not those of an undisturbed run")
    steps = [row[0] for row in found.history if row[1] is not None]
    if steps != list(range(1, len(steps) + 1)):
        raise Lost(f"{run.name}: its history has the steps {steps}")
    refused = [path.name for path in run.rglob("*.corrupt")]
    if refused:
        raise Lost(f"{run.name}: it refused {', '.join(refused)}")
    left = [str(path.relative_to(run)) for path in run.rglob(".tmp-*")]
    if left:
        raise Orphans(f"{run.name}: it left {', '.join(left)}")


@contextmanager
def noting(failures: list[str], orphans: list[str], say: Callable[[str], object]) -> Iterator[None]:
    """Note what goes wrong in the block, and go on with the next kill."""
    try:
        yield
    except Orphans as error:
        orphans.append(str(error))
    except Lost as error:
        failures.append(str(error))
        say(str(error))


def tail(log: Path) -> str:
    """The last lines that a run printed."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "".join(f"\n    {line}" for line in lines[-12:])
