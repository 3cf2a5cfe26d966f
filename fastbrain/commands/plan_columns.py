"""Several plans side by side, a column each."""

from collections.abc import Iterable, Iterator

from fastbrain.commands import plan_words as words
from fastbrain.commands.plan_asked import Planned
from fastbrain.commands.plan_words import WIDTH, mib

_NAME = 28
_NONE = "-"


def side_by_side(found: list[Planned], operations: bool) -> str:
    """The columns; `operations` adds every operation of every step below."""
    components = _names(each.plan.memory.parts for each in found)
    parts = _names(words.parts(each.plan) for each in found)
    columns = [list(_column(each, components, parts)) for each in found]
    names = [name for name, _ in columns[0]]
    blocks = [list(_head(found))]
    for group in _groups([[cell for _, cell in column] for column in columns]):
        lines = [
            f"{name:{_NAME}}{''.join(cells)}".rstrip()
            for name, *cells in zip(names, *group, strict=True)
        ]
        blocks.append(lines)
    blocks += [notes] if (notes := list(_notes(found))) else []
    for each in found if operations else ():
        blocks.append([f"{each.label}:", *words.operations(each.plan)])
    blocks.append([words.closing(found[0].plan)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(found: list[Planned]) -> Iterator[str]:
    one = found[0]
    if len({each.plan.card.key for each in found}) == 1:
        yield f"{len(found)} shapes on {words.cards(one.plan)}{one.plan.card.name}"
    else:
        each_card = f"{one.plan.ranks:,} of each of " if one.plan.ranks > 1 else ""
        yield f"{one.shape.name} on {each_card}{len(found)} cards: {one.plan.counts}"
        yield words.wrapped(words.model(one.plan.config), "  ", "    ")
    if one.plan.link is not None:
        joined = f"{one.plan.ranks:,} ranks, between them {words.link(one.plan.link)}"
        yield words.wrapped(joined, "  ", "    ")
    assumed = {each.shape.name: each for each in found if each.shape.vocabulary_assumed}
    if assumed:
        names = ", ".join(assumed)
        note = words.vocabulary_note(next(iter(assumed.values())).plan.config, names)
        yield words.wrapped(note, "  ", "    ")


def _notes(found: list[Planned]) -> Iterator[str]:
    """What a figure in a column does not say."""
    for shape in {each.shape.name: each.shape for each in found}.values():
        advice = words.aspect_advice(shape.config)
        if advice.startswith("too"):
            yield words.wrapped(f"{shape.name} is {advice}", "", "  ")
    too_large = [each.label for each in found if not each.fits]
    if too_large:
        yield words.wrapped(
            f"what does not fit, {', '.join(too_large)}: planned alone, it comes with what would "
            "save memory",
            "",
            "  ",
        )


def _column(
    found: Planned, components: Iterable[str], parts: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """What each row is called, the same for every plan, and what this plan has there."""
    made = found.plan
    memory, times = made.memory, words.parts(made)
    yield "", found.label
    yield "parameters, M", f"{made.counts.total / 1e6:,.1f}"
    yield "  active, M", f"{made.counts.active / 1e6:,.1f}"
    yield "layers x d_model", f"{made.config.n_layers} x {made.config.d_model}"
    yield "d_model / layers (50 to 100)", f"{made.aspect_ratio:.1f}"
    yield "micro-batch x tokens", f"{made.batch} x {made.seq}"
    yield "micro-batches of a step", f"{made.accumulate}"
    yield "operands", "BF16" if made.mixed_precision else "FP32"
    if made.ranks > 1:
        yield "ranks", f"{made.ranks:,} {made.parallel}"
    yield "", ""
    yield "Memory of each rank, MiB" if made.ranks > 1 else "Memory, MiB", ""
    for name in components:
        yield f"  {name}", mib(memory.parts[name]) if name in memory.parts else _NONE
    yield "  peak", mib(memory.peak_bytes)
    yield "  needed, with the driver", mib(memory.needed_bytes)
    yield "  to fit into", mib(found.limit_bytes) if found.limit_bytes else _NONE
    yield "  fits", "yes" if found.fits else "NO"
    most = found.largest_micro_batch
    yield "  largest micro-batch", _NONE if most is None else f"{most:,}"
    yield "", ""
    yield "Time of a step, ms", ""
    for name in parts:
        yield f"  {name}", words.milliseconds(times[name]) if name in times else _NONE
    yield "  step", words.milliseconds(made.step_ms)
    yield "  limited by", "launches" if made.host_bound else "kernels"
    if made.communication is not None:
        yield "", ""
        yield "Communication in a step", ""
        yield "  sent by each rank, MiB", mib(made.communication.sent_bytes)
        yield "  it takes, ms", words.milliseconds(made.communication.ms)
        yield "  waited for, ms", words.milliseconds(made.communication.exposed_ms)
    yield "", ""
    if made.ranks > 1:
        yield "efficiency", f"{made.efficiency:.1%}"
    yield "tokens/s", words.rate(made.tokens_per_s)
    yield "TFLOPS", f"{made.tflops:,.3g}"
    yield "MFU", f"{made.mfu:.1%}"
    yield f"days for {words.about(found.tokens)} tokens", words.plain_days(made.days(found.tokens))
    yield "tokens for 20 per active one", words.about(made.recommended_tokens)
    yield "  days for them", words.plain_days(made.days(made.recommended_tokens))


def _names(tables: Iterable[dict[str, float]] | Iterable[dict[str, int]]) -> list[str]:
    """The keys of all tables, each once, in the order of the longest."""
    longest_first = sorted(tables, key=len, reverse=True)
    return list(dict.fromkeys(name for table in longest_first for name in table))


def _groups(columns: list[list[str]]) -> Iterator[list[list[str]]]:
    """The columns, padded, as many together as a line holds."""
    room, group = WIDTH - _NAME, list[list[str]]()
    for column in columns:
        width = max(map(len, column)) + 2
        if group and width > room:
            yield group
            room, group = WIDTH - _NAME, []
        room -= width
        group.append([f"{cell:>{width}}" for cell in column])
    yield group
