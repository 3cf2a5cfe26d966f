"""What the processes of one run say to each other beside gradients: sums, documents, barriers.

There are groups of the same ranks that differ in patience. Before the first step one may wait as
long as it takes while another tokenizes gigabytes. Saves and evaluations may take an hour. These go
through gloo. What belongs to a step goes through the device's own backend, and a rank that does not
come to it within minutes is given up.

Documents are JSON: nothing is pickled.
"""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fastbrain.errors import FastBrainError, InvalidConfig, UnsupportedCuda
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.meeting import meeting

T = TypeVar("T")

# with what one rank prepares for all, with what is done between steps, and with a step
HOST_PATIENCE, PAUSE_PATIENCE = timedelta(days=1), timedelta(hours=1)
STEP_PATIENCE = timedelta(minutes=10)

# how the messages of gloo and NCCL begin, or what is in them, when another rank is not there
_LOST = ("gloo", "NCCL", "ProcessGroup", "Connection", "collective", "Socket", "TCPStore")


class RankLost(FastBrainError):
    """Another process of the run has died, was refused, does not answer, or calls otherwise."""


class Ranks:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        local_size: how many of them are on this machine.
        device: where this one computes.
        group: of the collectives of a step; None when alone.
    """

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.rank = launch.rank
        self.size = launch.world_size
        self.local_size = launch.local_world_size
        self.device = device
        self.group: dist.ProcessGroup | None = None
        self._host: dist.ProcessGroup | None = None
        self._pause: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls) -> Self:
        """One process, on the first card where there is one."""
        cuda = torch.cuda.is_available()
        return cls(Launch(), torch.device("cuda", 0) if cuda else torch.device("cpu"))

    @classmethod
    def join(cls, launch: Launch | None = None) -> Self:
        """Meet the other processes that torchrun started; `leave` ends it.

        Every one takes the card of its local rank, with NCCL between them; where no machine has a
        card they are CPUs, with gloo. A process that torchrun did not start is alone.

        Args:
            launch: how this process was started; what the environment says when None.

        Raises:
            InvalidConfig: the environment says half of it.
            UnsupportedCuda: there are fewer cards than processes here, or some machines have
                cards and others none.
            RankLost: the others do not come.
        """
        launch = launch or Launch.find()
        if launch.alone:
            return cls.alone()
        if dist.is_initialized():
            raise InvalidConfig(
                "this process has joined the other ranks before: take what Ranks.join returned then"
            )
        ranks = cls(launch, torch.device("cpu"))
        with _hearing():
            store, rank, size = next(rendezvous("env://", timeout=STEP_PATIENCE))
            dist.init_process_group(
                "gloo",
                store=PrefixStore(meeting(store, rank, size, STEP_PATIENCE), store),
                rank=rank,
                world_size=size,
                timeout=STEP_PATIENCE,
            )
            ranks._host = dist.new_group(timeout=HOST_PATIENCE)
            ranks._pause = dist.new_group(timeout=PAUSE_PATIENCE)
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        fewest = ranks.lowest(cards)
        if fewest == 0 < ranks.highest(cards):
            where = f"{socket.gethostname()} has {cards or 'no'} card{'s' * (cards != 1)}"
            raise UnsupportedCuda(
                f"{where}, and another machine of the run differs: all have cards or none; hide "
                "them by setting the environment variable CUDA_VISIBLE_DEVICES to nothing"
            )
        if fewest == 0:
            with _hearing():
                ranks.group = dist.new_group(timeout=STEP_PATIENCE)
            return ranks
        short, here = cards < launch.local_world_size, socket.gethostname()
        if ranks.highest(int(short)):
            raise UnsupportedCuda(
                f"{launch.local_world_size} processes were started on {here}, which has {cards} "
                f"card{'s' * (cards != 1)}, and every process needs one: give torchrun "
                f"--nproc-per-node {cards}"
                if short
                else "another machine has fewer cards than processes; see what it says"
            )
        ranks.device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(ranks.device)
        with _hearing():
            ranks.group = dist.new_group(backend="nccl", timeout=STEP_PATIENCE)
        return ranks

    def leave(self) -> None:
        """Say goodbye, once all is done; after a failure a process just ends."""
        if self.size > 1:
            self.barrier()
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all are here; an hour at most."""
        if self.size > 1:
            with _hearing():
                dist.barrier(group=self._pause)

    def first(self, work: Callable[[], T]) -> T:
        """What `work`, done by the first rank alone, returned there: a JSON value.

        The others wait. Where it raises, they hear that the first rank is gone.
        """
        if self.size == 1:
            return work()
        content = json.dumps(work()).encode() if self.leads else b""
        with _hearing():
            length = torch.tensor([len(content)])
            dist.broadcast(length, src=0, group=self._host)
            found = torch.zeros(int(length), dtype=torch.uint8)
            if self.leads:
                found = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(found, src=0, group=self._host)
        told: T = json.loads(found.numpy().tobytes())
        return told

    def in_turn(self, work: Callable[[], T]) -> T:
        """What `work` returns here, begun once the first rank is through with it.

        So what is wrong on all of them is said once: the others hear that the first is gone.
        """
        found = [work()] if self.leads else []
        self.barrier()
        return found[0] if found else work()

    def add(self, values: Sequence[float]) -> list[float]:
        """Each of some numbers summed over the ranks, in FP64, on the host."""
        return self._on_host(values, dist.ReduceOp.SUM)

    def lowest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return int(self._on_host([value], dist.ReduceOp.MIN)[0])

    def highest(self, value: int) -> int:
        """The largest of the ranks' values."""
        return int(self._on_host([value], dist.ReduceOp.MAX)[0])

    def spread(self, tensor: Tensor) -> None:
        """Make a tensor, of any device, what it is on the first rank."""
        if self.size > 1:
            values = tensor.detach().cpu()
            with _hearing():
                dist.broadcast(values, src=0, group=self._host)
            tensor.detach().copy_(values)

    def sum(self, numbers: Tensor) -> Tensor:
        """A tensor on the ranks' devices summed over them, in place; the host does not wait."""
        if self.size > 1:
            with _hearing():
                dist.all_reduce(numbers, group=self.group)
        return numbers

    def _on_host(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with _hearing():
            dist.all_reduce(numbers, op=operation, group=self._host)
        found: list[float] = numbers.tolist()
        return found


@contextmanager
def hearing(ranks: Ranks | None) -> Iterator[None]:
    """Turns what a step of several ranks raises when another is gone into `RankLost`."""
    if ranks is None or ranks.size == 1:
        yield
        return
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(w in str(error) for w in _LOST):
            raise
        raise _lost(error) from error


@contextmanager
def _hearing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> RankLost:
    # gloo goes on with advice
    said = (str(error).strip().splitlines() or [""])[0].partition(". This is")[0]
    return RankLost(
        "another process of this run has ended, does not answer, or makes other calls than this "
        f"one; its own last lines say which ({said})"
    )
