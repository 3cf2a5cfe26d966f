"""How processes that were started together find each other in a store that others have used.

torchrun keeps its store when it starts processes anew, with the addresses of those before in it,
and its counts of restarts may differ between machines: one has seen a process die, another only
that somebody left. So every process brings a word of its own, the first one joins them, and once
all have agreed to the same that is the name of a part of the store which nobody has used.
"""

import secrets
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

_PAUSE_S = 0.02


class NotMet(RuntimeError):
    """Some have not come in time."""


def meeting(store: Store, rank: int, size: int, patience: timedelta) -> str:
    """A name that only these processes know.

    Args:
        store: that all of them reach.
        rank: of this one.
        size: how many there are.
        patience: with those that are late.

    Raises:
        NotMet: names those that have not come.
    """
    own, ends = secrets.token_hex(8), time.monotonic() + patience.total_seconds()
    store.set(f"here {rank}", own)
    while True:
        missing = _lead(store, own, size) if rank == 0 else _follow(store, own, rank)
        name = _read(store, "met")
        if not missing and name is not None and own in name.split("."):
            return name
        if time.monotonic() > ends:
            raise NotMet(f"{missing or 'the other processes'} did not come within {patience}")
        time.sleep(_PAUSE_S)


def _lead(store: Store, own: str, size: int) -> str:
    """Join the words that are there; who is missing or has not agreed yet, in words."""
    words = [own, *(_read(store, f"here {rank}") for rank in range(1, size))]
    absent = [rank for rank, word in enumerate(words) if word is None]
    if not absent:
        name = ".".join(map(str, words))
        store.set("proposed", name)
        absent = [rank for rank in range(1, size) if _read(store, f"agreed {rank}") != name]
        if not absent:
            store.set("met", name)
    return f"rank {', '.join(map(str, absent))}" if absent else ""


def _follow(store: Store, own: str, rank: int) -> str:
    """Agree to what has this one's word in it; who is missing, in words."""
    name = _read(store, "proposed")
    if name is None or own not in name.split("."):
        return "rank 0"
    store.set(f"agreed {rank}", name)
    return ""


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
