"""Every contender of a training benchmark, those that cannot run here included."""

from collections.abc import Iterator

import torch

from bench import peers
from bench.compiled_peer import CompiledPeer
from bench.contenders import Absent, Contender, Ours, label
from bench.graphed import Graphed
from bench.shapes import TrainingShape

TRAINEES = (Ours, Graphed, CompiledPeer, peers.Peer)


def line_up(
    shape: TrainingShape, precisions: list[str], device: torch.device
) -> Iterator[Contender | Absent]:
    """Ours in the given precisions, and the peers in every way they might be fastest.

    Mixed precision has to beat a peer's better precision, so both of them race then. A model is
    built when its first contender is asked for.
    """
    for ours in (Ours, Graphed):
        missing = ours.missing(device)
        for precision in precisions:
            yield (
                Absent(label(ours.name, precision), missing)
                if missing
                else Contender(ours(shape, device), precision)
            )
    theirs = ["fp32", "bf16"] if "bf16" in precisions else ["fp32"]
    yield from _compiled(shape, theirs, device)
    yield from _hugging_face(shape, theirs, device)


def _compiled(
    shape: TrainingShape, precisions: list[str], device: torch.device
) -> Iterator[Contender | Absent]:
    missing = CompiledPeer.missing(device)
    if missing:
        yield Absent(CompiledPeer.name, missing)
        return
    model = CompiledPeer(shape, device)
    for option in CompiledPeer.options(device):
        yield from (Contender(model, precision, option) for precision in precisions)


def _hugging_face(
    shape: TrainingShape, precisions: list[str], device: torch.device
) -> Iterator[Contender | Absent]:
    missing = peers.Peer.missing(device)
    if missing:
        yield Absent(peers.Peer.name, missing)
        return
    model = peers.Peer(shape, device)
    for precision in precisions:
        for experts, reason in peers.experts_implementations(shape):
            contender = Contender(model, precision, experts)
            yield Absent(contender.label, reason) if reason else contender
