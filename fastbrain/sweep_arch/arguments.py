"""The arguments of the command line: positionals as in the reference system, flags for the rest."""

import argparse

from fastbrain.plan.links import LINKS, USUAL_CPU_LINK, USUAL_LINK
from fastbrain.sweep_arch.request import DEFAULT_TOKENS, FEWEST_STEPS
from fastbrain.sweep_arch.values import (
    decimal,
    device,
    layers,
    link,
    parallel,
    rope_scaling,
    tokens,
    whole,
)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Give a parser the reference system's positionals, with its defaults."""
    number = whole(1)
    # each layer of a configuration is a number in a tuple
    blocks = whole(1, 10_000)
    shape = parser.add_argument_group("shape, in this order")
    for name, kind, default, text in (
        ("vocab", number, 32_000, "token ids"),
        ("d_model", number, 512, "width"),
        ("layers", blocks, 8, "blocks"),
        ("batch", number, 16, "sequences of a step"),
        ("seq", number, 512, "tokens of a sequence"),
    ):
        shape.add_argument(name, nargs="?", type=kind, default=default, help=f"{text} ({default})")
    shape.add_argument(
        "moe", nargs="?", type=whole(0, 1), default=1, help="1 mixture of experts, 0 dense (1)"
    )
    shape.add_argument("experts", nargs="?", type=number, default=8, help="of a MoE layer (8)")
    shape.add_argument("top_k", nargs="?", type=number, default=2, help="experts of a token (2)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser every other setting."""
    number = whole(1)
    flags = parser.add_argument_group("widths and the rest of the shape")
    for name, text in (
        ("heads", "query heads (d_model / head_dim)"),
        ("kv-heads", "key-value heads (a quarter of the heads)"),
        ("head-dim", "channels of a head (64)"),
        ("d-ff", "hidden width of a dense feed-forward (d_model * 11 / 4)"),
        ("moe-d-ff", "hidden width of an expert (d_model * 11 / 16)"),
        ("max-seq-len", "positions (seq, at least 256)"),
    ):
        flags.add_argument(f"--{name}", type=number, metavar="N", help=text)
    experts = flags.add_mutually_exclusive_group()
    experts.add_argument(
        "--moe-start", type=whole(0), metavar="N", help="first MoE layer, from 0 (2)"
    )
    experts.add_argument(
        "--moe-layers", type=layers, metavar="N,N,...", help="the MoE layers, from 0, one by one"
    )
    flags.add_argument("--no-shared-expert", action="store_true", help="routed experts alone")
    flags.add_argument("--untied", action="store_true", help="a head of its own")
    flags.add_argument("--rope-base", type=decimal, metavar="X", help="(10000)")
    flags.add_argument(
        "--rope-scaling",
        type=rope_scaling,
        metavar="RULE",
        help="linear:FACTOR or llama3:FACTOR:LOW:HIGH:ORIGINAL",
    )
    flags.add_argument("--rmsnorm-eps", type=decimal, metavar="X", help="(1e-6)")
    flags.add_argument("--aux-loss-weight", type=decimal, metavar="X", help="(0.01)")
    flags.add_argument("--router-z-loss-weight", type=decimal, metavar="X", help="(1e-3)")

    run = parser.add_argument_group("the measurement")
    run.add_argument(
        "--device", type=device, help="cpu, cuda or cuda:N (cuda where there is a card)"
    )
    run.add_argument(
        "--mixed-precision",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="BF16 operands or FP32 ones (BF16 on CUDA, FP32 on the CPU)",
    )
    run.add_argument(
        "--steps",
        type=whole(FEWEST_STEPS),
        default=FEWEST_STEPS,
        metavar="N",
        help=f"timed steps, after 2 that are not ({FEWEST_STEPS}, the fewest)",
    )
    run.add_argument(
        "--budget-mib", type=whole(0), default=0, metavar="N", help="memory to keep within (0: all)"
    )
    run.add_argument(
        "--tokens",
        type=tokens,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="of the run whose days are told, like 50e9 or 3.5B (50B)",
    )
    run.add_argument(
        "--ranks",
        type=whole(1),
        default=1,
        metavar="N",
        help="also predict N such devices that train together, from what this one takes (1)",
    )
    run.add_argument(
        "--parallel",
        type=parallel,
        metavar="KIND",
        help="of ranks: auto, ddp (the whole model on each) or fsdp (a shard) (auto)",
    )
    run.add_argument(
        "--link",
        type=link,
        metavar="NAME",
        help=f"between ranks: {', '.join(LINKS)}, or GB/s ({USUAL_LINK}; of CPUs {USUAL_CPU_LINK})",
    )
    run.add_argument("--json", action="store_true", help="one JSON object instead of the line")
