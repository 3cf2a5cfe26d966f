"""Plans as one JSON object: every figure, and the table of rates that they rest on."""

from dataclasses import asdict
from typing import Any

from fastbrain.commands import plan_words as words
from fastbrain.commands.plan_asked import Planned
from fastbrain.plan import RATES, SHARE_SOURCES, Timed, flops_per_token
from fastbrain.plan.rates import GAP_SOURCE, GAP_US, HOST_SOURCE, HOST_US


def document(found: list[Planned]) -> dict[str, Any]:
    """Everything there is to say of some plans, ready for JSON."""
    return {
        "predicted": True,
        "plans": [_plan(each) for each in found],
        "rates": {
            **{name: asdict(rate) for name, rate in RATES.items()},
            "gap between launches": {"us": GAP_US, "source": GAP_SOURCE},
            "shares of products and kernels, by card": {"source": SHARE_SOURCES},
            "start of an operation by the host": {"us": HOST_US, "source": HOST_SOURCE},
        },
    }


def _plan(found: Planned) -> dict[str, Any]:
    made, memory, shape = found.plan, found.plan.memory, found.shape
    return {
        "name": shape.name,
        "config": asdict(made.config),
        "vocabulary_assumed": shape.vocabulary_assumed,
        "parameters": {"total": made.counts.total, "active": made.counts.active},
        "aspect_ratio": made.aspect_ratio,
        "aspect_advice": words.aspect_advice(made.config),
        "card": asdict(made.card),
        "batch": made.batch,
        "seq": made.seq,
        "accumulate": made.accumulate,
        "mixed_precision": made.mixed_precision,
        "ranks": made.ranks,
        "parallel": made.parallel,
        "parallel_because": made.choice and made.choice.why,
        "link": made.link and {**asdict(made.link), "gb_per_s": made.link.gb_per_s},
        "step_tokens": made.tokens,
        "memory": {
            **asdict(memory),
            "needed_bytes": memory.needed_bytes,
            "budget_bytes": found.budget_bytes,
            "fits": found.fits,
            "largest_micro_batch": found.largest_micro_batch,
        },
        "remedies": [asdict(each) for each in found.ways_out()],
        "step_ms": made.step_ms,
        "ms_by_part": made.ms_by_part(),
        "host_bound": made.host_bound,
        "communication": made.communication and asdict(made.communication),
        "efficiency": made.efficiency,
        "tokens_per_s": made.tokens_per_s,
        "flops_per_token": flops_per_token(made.config, made.seq),
        "tflops": made.tflops,
        "peak_tflops": made.card.flops(made.mixed_precision) / 1e12,
        "mfu": made.mfu,
        "tokens": found.tokens,
        "days": made.days(found.tokens),
        "recommended_tokens": made.recommended_tokens,
        "recommended_days": made.days(made.recommended_tokens),
        "run_tokens": shape.run_tokens,
        "run_days": None if shape.run_tokens is None else made.days(shape.run_tokens),
        "operations": [_operation(each) for each in made.operations],
    }


def _operation(each: Timed) -> dict[str, Any]:
    what = each.operation
    return {
        "name": what.name,
        "part": what.part,
        "rate": what.rate,
        "flops": what.flops,
        "bytes": what.bytes,
        "launches": what.launches,
        "ms": each.ms,
        "limit": each.limit,
    }
