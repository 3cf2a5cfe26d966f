"""`fastbrain plan`: what a shape would cost on a card, predicted before anything runs."""

import argparse
import json
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

from fastbrain.commands import plan_document, plan_picture
from fastbrain.commands.plan_asked import ALL, Planned, planned
from fastbrain.commands.plan_columns import side_by_side
from fastbrain.commands.plan_text import report
from fastbrain.errors import FastBrainError
from fastbrain.plan import CARDS, LINKS, THIS_MACHINE
from fastbrain.plan.links import USUAL_CPU_LINK, USUAL_LINK
from fastbrain.training.config_files import shipped_shapes

DONE, REFUSED = 0, 2

_EPILOG = """example:
  fastbrain plan
  fastbrain plan 300m-moe-12gb --card rtx4090
  fastbrain plan model.d_model=768 model.n_layers=12 --batch 4 --seq 512
  fastbrain plan 124m 300m-moe-12gb --picture shapes.png
  fastbrain plan 300m-moe-12gb --card all
  fastbrain plan 124m --ranks 2 --link pcie3x8

CONFIG is a TOML file or a shipped configuration: {names}.
Without one it is the default model. Cards: {cards}.
{machine} is the card or CPU at hand, which is measured first; all is one shape on every card.
Links between ranks: {links};
or the GB/s that one carries in each direction. Where they differ, name the slowest.
With --ranks, --batch, --accumulate and --budget-mib are of each rank.
Exit codes: 0 planned, whether it fits or not; 2 refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG.format(
        names=", ".join(shipped_shapes()),
        cards=", ".join(CARDS),
        machine=THIS_MACHINE,
        links=textwrap.fill(", ".join(LINKS), 80),
    )
    # under this name words from between and after the options join them
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="CONFIG | KEY=VALUE",
        help="shapes to plan, and settings of all of them, like model.n_layers=12",
    )
    # values are read later, where what is wrong with one is a sentence
    parser.add_argument(
        "--card", default="rtx3060", help=f"a card, {THIS_MACHINE} or {ALL} (rtx3060)"
    )
    parser.add_argument(
        "--batch", metavar="N", help="rows of a micro-batch (of CONFIG; else at most 8)"
    )
    parser.add_argument("--seq", metavar="N", help="tokens of a row (of CONFIG; else 1024)")
    parser.add_argument(
        "--accumulate",
        metavar="N",
        help="micro-batches of a step (to CONFIG's batch; else 1)",
    )
    parser.add_argument(
        "--mixed-precision",
        action=argparse.BooleanOptionalAction,
        help="BF16 operands or FP32 ones (of CONFIG; else BF16 on a card, FP32 on a CPU)",
    )
    parser.add_argument("--ranks", metavar="N", help="cards that train together, one a process (1)")
    parser.add_argument(
        "--parallel",
        metavar="KIND",
        help="of ranks: auto, ddp (the whole model on each) or fsdp (a shard) (of CONFIG; auto)",
    )
    parser.add_argument(
        "--link", metavar="NAME", help=f"between ranks ({USUAL_LINK}; of CPUs {USUAL_CPU_LINK})"
    )
    parser.add_argument("--tokens", metavar="N", default="50e9", help="of a run, like 3.5B (50e9)")
    parser.add_argument("--budget-mib", metavar="N", help="memory to keep within (all of the card)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="side by side, as several CONFIGs are anyway; fewer than two join the shipped ones",
    )
    parser.add_argument("--operations", action="store_true", help="every operation of a step")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    parser.add_argument("--picture", metavar="FILE", help="draw speed and memory: .png or .svg")


def run(options: argparse.Namespace) -> int:
    """Plan what the options ask for and print it; returns the exit code."""
    try:
        picture = None if options.picture is None else Path(options.picture)
        if picture is not None:
            plan_picture.check(picture)
        found = planned(options)
        if picture is not None:
            plan_picture.draw(found, picture)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    said = json.dumps(plan_document.document(found)) if options.json else _text(found, options)
    # a reader like head may have had enough
    with suppress(BrokenPipeError):
        print(said, flush=True)
    if picture is not None:
        print(f"drawn: {picture}", file=sys.stderr)
    return DONE


def _text(found: list[Planned], options: argparse.Namespace) -> str:
    if len(found) == 1:
        return report(found[0], options.operations)
    return side_by_side(found, options.operations)
