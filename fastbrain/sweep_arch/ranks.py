"""What several such devices would do together: predicted from the step that one was measured at."""

import statistics
from dataclasses import asdict
from typing import Any

from fastbrain.plan import chosen, communication, usual_link
from fastbrain.sweep_arch.measure import Measurement
from fastbrain.sweep_arch.place import Place
from fastbrain.sweep_arch.prediction import device_card
from fastbrain.sweep_arch.request import Request

_DAY_S = 86_400
_MIB = 2**20


def predicted(request: Request, place: Place, measured: Measurement) -> dict[str, Any] | None:
    """The figures of the ranks that are asked for, ready for JSON; None of one rank.

    Each takes the measured step, and waits for what the link cannot carry meanwhile. The rest of
    what sharing changes is left out: the smaller update and the copies of FSDP2.
    """
    card = device_card(place)
    limits = [size for size in (place.total_bytes, request.budget_mib * _MIB) if size]
    choice, held = chosen(
        request.config,
        card,
        request.batch,
        request.seq,
        measured.mixed_precision,
        1,
        request.ranks,
        request.parallel,
        # 0 is unknown, whatever an unknown card is taken for
        min(limits, default=0),
    )
    if choice is None:
        return None
    link = request.link or usual_link(card)
    alone_ms = 1e3 * statistics.median(measured.seconds)
    sent = communication(request.config, choice.parallel, request.ranks, link, alone_ms)
    step_ms = alone_ms + sent.exposed_ms
    tokens_per_s = 1e3 * request.ranks * request.batch * request.seq / step_ms
    return {
        "predicted": True,
        "ranks": request.ranks,
        "parallel": choice.parallel,
        "because": choice.why,
        "link": {**asdict(link), "gb_per_s": link.gb_per_s},
        "peak_bytes": held.peak_bytes,
        "needed_bytes": held.needed_bytes,
        "sent_bytes": sent.sent_bytes,
        "communication_ms": sent.ms,
        "exposed_ms": sent.exposed_ms,
        "step_ms": step_ms,
        "tokens_per_s": tokens_per_s,
        "efficiency": alone_ms / step_ms,
        "days": request.tokens / tokens_per_s / _DAY_S,
    }
