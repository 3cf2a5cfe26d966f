"""What the plan says of the shape that is measured: its peak, its time, and how to need less."""

from typing import Any

from fastbrain.plan import CARDS, Card, Plan, Remedy, known_card, plan, remedies
from fastbrain.sweep_arch.place import Place
from fastbrain.sweep_arch.request import Request

_MIB = 2**20


def planned(request: Request, place: Place) -> Plan:
    """The plan of this shape on this device."""
    return plan(
        request.config,
        device_card(place),
        request.batch,
        request.seq,
        mixed_precision=_mixed_precision(request, place),
    )


def facts(planned: Plan, place: Place) -> dict[str, Any]:
    """Its figures, to stand beside the measured ones; no time for a device of unknown speed."""
    card = known(place)
    return {
        "card": None if card is None else card.key,
        "step_ms": None if card is None else planned.step_ms,
        "tokens_per_s": None if card is None else planned.tokens_per_s,
        "peak_bytes": planned.memory.peak_bytes,
    }


def known(place: Place) -> Card | None:
    """The card, if it is one whose peaks are known."""
    return known_card(place.name) if place.is_cuda else None


def peak_flops(place: Place, mixed_precision: bool) -> float | None:
    """Operations per second that the card could do at best; None where that is unknown."""
    card = known(place)
    return None if card is None else card.flops(mixed_precision)


def too_large(request: Request, place: Place, planned: Plan) -> str | None:
    """Why a shape need not be tried on the CPU; None if it may fit.

    A card has an allocator that refuses; a CPU goes on until the system ends something.
    """
    if place.is_cuda:
        return None
    expected = planned.memory.peak_bytes
    if request.budget_mib and expected > request.budget_mib * _MIB:
        return (
            f"this shape needs about {expected / _MIB:,.0f} MiB, more than the budget of "
            f"{request.budget_mib:,} MiB"
        )
    # weights, gradients and two moments, FP32 each: no estimate, and the least that it can be
    least = request.config.parameter_counts().total * 16
    if place.total_bytes is not None and least > place.total_bytes:
        return (
            f"weights, gradients and moments alone need {least / _MIB:,.0f} MiB, and this machine "
            f"has {place.total_bytes / _MIB:,.0f} MiB"
        )
    if place.total_bytes is not None and expected > place.total_bytes:
        return (
            f"this shape needs about {expected / _MIB:,.0f} MiB, and this machine has "
            f"{place.total_bytes / _MIB:,.0f} MiB"
        )
    return None


def ways_out(request: Request, place: Place) -> tuple[Remedy, ...]:
    """How to need less memory, cheapest first."""
    mixed = _mixed_precision(request, place)
    card = device_card(place)
    return remedies(request.config, card, request.batch, request.seq, mixed_precision=mixed)


def _mixed_precision(request: Request, place: Place) -> bool:
    return place.is_cuda if request.mixed_precision is None else request.mixed_precision


def device_card(place: Place) -> Card:
    """The device as the plan knows it; of the CPU and of an unknown card its memory alone."""
    if not place.is_cuda:
        # its rates are not asked for, and measuring them takes seconds and memory
        return Card("cpu", place.name, 1, 0, 1.0, 1.0, 1.0, place.total_bytes or 0, is_cpu=True)
    # for the memory of one that is not known, the home card's rules
    return known_card(place.name) or CARDS["rtx3060"]
