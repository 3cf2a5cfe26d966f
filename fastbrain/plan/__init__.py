"""What a shape costs on a card, before a run: parameters, bytes, operations, time, days.

Nothing here is measured: see docs/planning.md for how far the predictions are to be trusted.
"""

from fastbrain.plan.cards import CARDS, SHARE_SOURCES, THIS_MACHINE, Card, find_card, known_card
from fastbrain.plan.choice import Choice, chosen
from fastbrain.plan.communication import Communication, communication
from fastbrain.plan.links import LINKS, Link, find_link, usual_link
from fastbrain.plan.memory import Memory, largest_micro_batch, memory
from fastbrain.plan.operations import Operation, training_step
from fastbrain.plan.planning import Plan, flops_per_token, plan
from fastbrain.plan.rates import RATES, Rate, Timed, step_ms, timed
from fastbrain.plan.remedies import Remedy, remedies
from fastbrain.plan.saved import saved_bytes

__all__ = [
    "CARDS",
    "LINKS",
    "RATES",
    "SHARE_SOURCES",
    "THIS_MACHINE",
    "Card",
    "Choice",
    "Communication",
    "Link",
    "Memory",
    "Operation",
    "Plan",
    "Rate",
    "Remedy",
    "Timed",
    "chosen",
    "communication",
    "find_card",
    "find_link",
    "flops_per_token",
    "known_card",
    "largest_micro_batch",
    "memory",
    "plan",
    "remedies",
    "saved_bytes",
    "step_ms",
    "timed",
    "training_step",
    "usual_link",
]
