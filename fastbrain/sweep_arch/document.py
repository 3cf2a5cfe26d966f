"""A measurement as one JSON object: everything that was asked, measured, foretold and warned of."""

import math
import shlex
import statistics
from dataclasses import asdict
from typing import Any

from fastbrain.plan import flops_per_token
from fastbrain.sweep_arch.measure import WARM_UP_STEPS, Measurement
from fastbrain.sweep_arch.place import Place, versions
from fastbrain.sweep_arch.prediction import peak_flops
from fastbrain.sweep_arch.request import Request

_DAY_S = 86_400


def document(
    request: Request,
    arguments: list[str],
    place: Place,
    measured: Measurement,
    foretold: dict[str, Any],
    gpu: dict[str, Any] | None,
    warnings: list[str],
    together: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything there is to say of a measurement, ready for JSON.

    Args:
        request: what was asked for.
        arguments: the words that it was asked in.
        place: where it was measured.
        measured: the measurement.
        foretold: what the plan says of it.
        gpu: what the driver said of the card; None on the CPU.
        warnings: what speaks against the figures.
        together: what is predicted of several ranks; None of one.
    """
    counts = request.config.parameter_counts()
    step_tokens = request.batch * request.seq
    rate = step_tokens / statistics.median(measured.seconds)
    flops = flops_per_token(request.config, request.seq)
    peak = peak_flops(place, measured.mixed_precision)
    return {
        "label": request.label,
        "command": shlex.join(["python", "-m", "fastbrain.sweep_arch", *arguments]),
        "versions": versions(),
        "device": place.facts(),
        "gpu": gpu,
        "config": asdict(request.config),
        "batch": request.batch,
        "seq": request.seq,
        "mixed_precision": measured.mixed_precision,
        "parameters": {"total": counts.total, "active": counts.active},
        "warm_up_steps": WARM_UP_STEPS,
        "step_seconds": measured.seconds,
        # NaN is no JSON
        "losses": [loss if math.isfinite(loss) else None for loss in measured.losses],
        "tokens_per_s": {
            "median": rate,
            "lowest": step_tokens / max(measured.seconds),
            "highest": step_tokens / min(measured.seconds),
        },
        "flops_per_token": flops,
        "tflops": rate * flops / 1e12,
        "peak_tflops": None if peak is None else peak / 1e12,
        "mfu": None if peak is None else rate * flops / peak,
        "memory": measured.memory,
        "tokens": request.tokens,
        "days": request.tokens / rate / _DAY_S,
        "prediction": foretold,
        "predicted_ranks": together,
        "warnings": warnings,
    }
