"""A look at the five functions of `fastbrain.atomic`, by which alone files come to the disk."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastbrain import atomic

NAMES = ("open", "write", "fsync", "rename", "sync_dir")

# called with the name of a function, its arguments, and what to call to have it done
Watcher = Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]


def install(watcher: Watcher) -> Callable[[], None]:
    """Have every operation go to `watcher`, one at a time whatever thread it comes from.

    Returns what undoes it.
    """
    real = {name: getattr(atomic, name) for name in NAMES}
    one_at_a_time = threading.RLock()

    def shim(name: str) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            with one_at_a_time:
                return watcher(name, arguments, real[name])

        return operation

    for name in NAMES:
        setattr(atomic, name, shim(name))

    def undo() -> None:
        for name, function in real.items():
            setattr(atomic, name, function)

    return undo


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """`install` for the length of a block."""
    undo = install(watcher)
    try:
        yield
    finally:
        undo()


def die() -> None:
    """End this process as `kill -9` does: no handler, no flush, no word."""
    os.kill(os.getpid(), signal.SIGKILL)
