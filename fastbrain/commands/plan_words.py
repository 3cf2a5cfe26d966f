"""Figures of a plan as a reader wants them: units, lengths of time, sentences about them."""

import textwrap

from fastbrain.commands.plan_asked import Planned
from fastbrain.config import TransformerConfig
from fastbrain.plan import Link, Plan, Timed
from fastbrain.plan.planning import ASPECT_RATIOS, EXPOSED
from fastbrain.sweep_arch.line import short_count

WIDTH = 100
_PREDICTED = "All of this is predicted, no step was run."
_VALIDATED = (
    "docs/baseline.md has such predictions beside published and measured figures, with the error "
    "of each."
)
_OF_RANKS = (
    "The rates of links are assumed, and no prediction of several ranks has been held against a "
    "measured one: python -m bench.scaling measures where there are several cards."
)
_MIB = 2**20


def wrapped(text: str, first: str = "", later: str | None = None) -> str:
    """Text in lines of at most `WIDTH` characters."""
    rest = first if later is None else later
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest)


def closing(made: Plan) -> str:
    """What the reader has to know of all of it."""
    return wrapped(f"{_PREDICTED} {_VALIDATED if made.ranks == 1 else _OF_RANKS}")


def cards(made: Plan) -> str:
    """How many cards, to stand before their name; nothing of one."""
    return f"{made.ranks:,} x " if made.ranks > 1 else ""


def mib(size: float) -> str:
    return f"{size / _MIB:,.0f}"


def about(count: int) -> str:
    """A count in three digits and a unit, such as 3.99B."""
    digits = len(str(count))
    return short_count(round(count, 3 - digits) if digits > 3 else count)


def duration(days: float) -> str:
    """A length of time in the unit that a reader thinks in; days beyond two of them."""
    for unit, size in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * size >= 2:
            return f"{days * size:,.1f} {unit}"
    return f"{days * 86_400:,.1f} seconds"


def plain_days(days: float) -> str:
    """Days alone, to stand beside others."""
    return f"{days:,.1f}" if days >= 10 else f"{days:.2g}"


def milliseconds(ms: float) -> str:
    return f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def moment(name: str) -> str:
    """When memory is fullest, as a clause."""
    return {
        "loss": "when the loss has its logits at hand",
        "end of backward": "when backward reaches the embedding",
        "update": "when Adam runs",
    }.get(name, f"when {name.replace('backward in', 'backward is in')}, counted from 0")


def limit(found: Planned) -> str:
    """What the step has to fit into."""
    if found.limit_bytes == found.budget_bytes:
        return f"the budget is {mib(found.limit_bytes)}"
    which = "each" if found.plan.ranks > 1 else "the"
    where = "machine" if found.plan.card.is_cpu else "card"
    return f"{which} {where} has {mib(found.limit_bytes)}"


def verdict(found: Planned) -> str:
    """Whether it fits, and by how much."""
    if not found.limit_bytes:
        return "how much this machine has is unknown"
    spare = found.limit_bytes - found.plan.memory.needed_bytes
    if found.fits:
        return f"{limit(found)}: fits, {spare // _MIB:,} to spare"
    return f"{limit(found)}: does not fit, {-(spare // _MIB):,} too many"


def vocabulary_note(config: TransformerConfig, names: str) -> str:
    """Says that the vocabulary of these configurations is left to a tokenizer."""
    return (
        f"the vocabulary of {names} is left to the tokenizer, here it is {config.vocab_size:,}: "
        "model.vocab_size=N plans another"
    )


def rows_note(made: Plan, asked: int | None) -> str:
    """Says that the ranks cannot share the rows that a configuration asks for; nothing if they can.

    Args:
        made: the plan.
        asked: rows of a step there.
    """
    at_once = made.ranks * made.batch
    if made.ranks == 1 or asked is None or asked % at_once == 0:
        return ""
    rows = at_once * made.accumulate
    return (
        f"train.global_batch_size {asked} is no multiple of {made.ranks} ranks times {made.batch} "
        f"rows, and training would refuse it: this is a plan of {rows}"
    )


def aspect_advice(config: TransformerConfig) -> str:
    """The chapter's rule on width over depth, and what to change where it is broken."""
    low, high = ASPECT_RATIOS
    width, depth = config.d_model, config.n_layers
    ratio = width / depth
    if low <= ratio <= high:
        return f"inside the working range of {low} to {high}"
    side = "deep and narrow" if ratio < low else "wide and shallow"
    ways = [f"at this depth a d_model of {low * depth:,} to {high * depth:,}"]
    fewest, most = -(-width // high), width // low
    if fewest <= most:
        layers = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        ways.insert(0, f"at this width {layers} layers")
    return f"too {side} for the working range of {low} to {high}: take " + ", or ".join(ways)


def model(config: TransformerConfig) -> str:
    """The shape, in words."""
    words = (
        f"{config.n_layers} layers of width {config.d_model:,}, {config.n_heads} query and "
        f"{config.n_kv_heads} key-value heads of {config.head_dim}"
    )
    if not config.moe_layers:
        return f"{words}, d_ff {config.d_ff:,}"
    shared = " and a shared one" if config.shared_expert else ""
    moe = len(config.moe_layers)
    dense = f"d_ff {config.d_ff:,}, " if moe < config.n_layers else ""
    return (
        f"{words}, {dense}in {moe} of the layers {config.num_experts} experts of "
        f"{config.moe_d_ff:,}, {config.experts_per_token} a token{shared}"
    )


def step(made: Plan) -> str:
    """What a step runs, in words."""
    rows = f"{made.batch} row{'s' if made.batch > 1 else ''} of {made.seq:,} tokens"
    operands = "BF16" if made.mixed_precision else "FP32"
    where = f" on each of {made.ranks:,} ranks" if made.ranks > 1 else ""
    if made.accumulate * made.ranks == 1:
        return f"a step is {rows}, {operands} operands"
    many = f"{made.accumulate} micro-batches of " if made.accumulate > 1 else ""
    return f"a step is {many}{rows}{where}, {made.tokens:,} tokens in all, {operands} operands"


def sharing(made: Plan) -> str:
    """How the ranks share the model, why, and what joins them; nothing of one rank."""
    if made.choice is None or made.link is None:
        return ""
    kind = {"ddp": "DDP, the whole model on each", "fsdp": "FSDP2, a shard of it on each"}
    return (
        f"{made.ranks:,} ranks by {kind[made.choice.parallel]} ({made.choice.why}); between them "
        f"{link(made.link)}"
    )


def link(found: Link) -> str:
    """A link, what it carries, and whence that is known."""
    if found.efficiency == 1:
        return f"{found.gb_per_s:.3g} GB/s in each direction, as given"
    return (
        f"{found.name}, {found.gb_per_s:.3g} GB/s in each direction ({found.efficiency:g} of "
        f"{found.nominal_gb_per_s:.3g} assumed)"
    )


def parts(made: Plan) -> dict[str, float]:
    """Milliseconds of the parts that a step has; a difference of sums is not one."""
    return {name: ms for name, ms in made.ms_by_part().items() if ms > 1e-9 * made.step_ms}


def operations(made: Plan) -> list[str]:
    """Every operation of a step, and their sum."""
    lines = [
        f"{'Operation':42}{'GFLOP':>12}{'MiB moved':>13}{'launches':>10}{'ms':>11}  limited by"
    ]
    for each in made.operations:
        lines.append(_operation(each))
    flops, moved, launches = (
        sum(getattr(each.operation, name) for each in made.operations)
        for name in ("flops", "bytes", "launches")
    )
    gaps = parts(made).get("gaps between launches", 0.0)
    lines.append(f"  {'gaps between launches':40}{'':35}{milliseconds(gaps):>11}")
    if made.communication is not None:
        waited = milliseconds(made.communication.exposed_ms)
        lines.append(f"  {EXPOSED:40}{'':35}{waited:>11}")
    total = f"{flops / 1e9:>12,.1f}{mib(moved):>13}{launches:>10,.0f}"
    return [*lines, f"  {'in all':40}{total}{milliseconds(made.step_ms):>11}"]


def _operation(each: Timed) -> str:
    what = each.operation
    flops = f"{what.flops / 1e9:,.1f}" if what.flops else "-"
    return (
        f"  {what.name:40}{flops:>12}{mib(what.bytes):>13}{what.launches:>10,.0f}"
        f"{milliseconds(each.ms):>11}  {each.limit}"
    )
