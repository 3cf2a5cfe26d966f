"""One plan as a page of text."""

from fastbrain.commands import plan_words as words
from fastbrain.commands.plan_asked import Planned
from fastbrain.commands.plan_words import mib
from fastbrain.plan import Communication

_BAR = 34


def report(found: Planned, operations: bool) -> str:
    """The page; `operations` adds every operation of a step."""
    made = found.plan
    counts = made.counts
    dense = counts.total == counts.active
    active = "all active" if dense else f"{counts.active / 1e6:,.1f}M of them active"
    head = (
        f"{found.label} on {words.cards(made)}{made.card.name}: {counts.total / 1e6:,.1f}M "
        f"parameters, {active}, micro-batch {made.batch}"
    )
    blocks = [
        [words.wrapped(head), *(words.wrapped(each, "  ", "    ") for each in _facts(found))],
        _memory(found),
        _time(found),
    ]
    if made.communication is not None:
        blocks.append(_communication(made.communication))
    blocks.append(_figures(found))
    if operations:
        blocks.append(words.operations(made))
    blocks.append([words.closing(made)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _facts(found: Planned) -> list[str]:
    facts = [words.model(found.plan.config), words.step(found.plan)]
    if found.plan.ranks > 1:
        facts.append(words.sharing(found.plan))
    if found.shape.vocabulary_assumed:
        facts.append(words.vocabulary_note(found.plan.config, found.shape.name))
    if note := words.rows_note(found.plan, found.shape.rows):
        facts.append(note)
    return facts


def _memory(found: Planned) -> list[str]:
    memory = found.plan.memory
    title = "Memory of each rank" if found.plan.ranks > 1 else "Memory"
    lines = [f"{title:28}{'MiB':>10}{'share':>9}"]
    for name, size in memory.parts.items():
        lines.append(_row(name, mib(size), size / memory.peak_bytes))
    when = words.moment(memory.moment)
    lines.append(f"  {'peak':26}{mib(memory.peak_bytes):>10}{'':9}  {when}")
    if memory.outside_bytes:
        outside = "outside of the allocator"
        lines.append(f"  {outside:26}{mib(memory.outside_bytes):>10}{'':9}  driver and kernels")
    start = f"  {'needed':26}{mib(memory.needed_bytes):>10}{'':11}"
    lines.append(words.wrapped(words.verdict(found), start, " " * len(start)))
    most = found.largest_micro_batch
    if most is not None:
        rows = f"rows of {found.plan.seq:,} tokens, with accumulation"
        lines.append(f"  {'largest micro-batch':26}{most:>10,}{'':9}  {rows}")
    if found.fits:
        return lines
    lines += ["", "It does not fit. What would save memory, cheapest first, each for itself:"]
    for number, remedy in enumerate(found.ways_out(), 1):
        lines.append(words.wrapped(str(remedy), f"  {number}. ", "     "))
    return lines


def _time(found: Planned) -> list[str]:
    made = found.plan
    lines = [f"{'Time of a step':28}{'ms':>10}{'share':>9}"]
    for name, ms in words.parts(made).items():
        lines.append(_row(name, words.milliseconds(ms), ms / made.step_ms))
    lines.append(f"  {'step':26}{words.milliseconds(made.step_ms):>10}")
    if made.host_bound:
        lines.append(
            words.wrapped(
                "Starting the operations takes longer than doing them: a larger micro-batch costs "
                "less for each token.",
                "  ",
            )
        )
    return lines


def _communication(found: Communication) -> list[str]:
    def row(name: str, figure: str, note: str) -> str:
        return f"  {name:26}{figure:>10}{'':9}  {note}".rstrip()

    return [
        "Communication of each rank in a step",
        row("sent, MiB", mib(found.sent_bytes), "and as many received"),
        row("it takes, ms", words.milliseconds(found.ms), ""),
        row("hidden, ms", words.milliseconds(found.hidden_ms), "goes on while the rank computes"),
        row("waited for, ms", words.milliseconds(found.exposed_ms), "makes the step longer"),
    ]


def _figures(found: Planned) -> list[str]:
    made = found.plan
    peak = made.card.flops(made.mixed_precision) / 1e12
    of_peak = f"MFU {made.mfu:.1%} of {peak:,.3g}"
    lines = [
        "Speed of all ranks" if made.ranks > 1 else "Speed",
        f"  {'tokens/s':26}{words.rate(made.tokens_per_s):>10}",
        f"  {'TFLOPS':26}{made.tflops:>10,.3g}           {of_peak}",
    ]
    if made.ranks > 1:
        lines.append(
            f"  {'efficiency':26}{made.efficiency:>10.1%}           of {made.ranks:,} ranks with "
            "nothing to send"
        )
    for tokens, why in _runs(found):
        days = words.duration(made.days(tokens))
        lines.append(f"  {words.about(tokens) + ' tokens':26}{days:>16}{'':5}{why}".rstrip())
    ratio = f"{made.aspect_ratio:.1f}"
    start = f"  {'d_model / n_layers':26}{ratio:>10}{'':11}"
    advice = words.aspect_advice(made.config)
    return [*lines, "", "Shape", words.wrapped(advice, start, " " * len(start))]


def _runs(found: Planned) -> list[tuple[int, str]]:
    """Lengths of a run, and why each."""
    made = found.plan
    runs = [
        (found.tokens, ""),
        (made.recommended_tokens, "recommended: 20 for each active parameter"),
    ]
    if found.shape.run_tokens:
        runs.append((found.shape.run_tokens, f"what {found.shape.name} asks for"))
    return runs


def _row(name: str, figure: str, share: float) -> str:
    bar = "#" * round(share * _BAR)
    return f"  {name:26}{figure:>10}{share:>9.1%}  {bar}".rstrip()
