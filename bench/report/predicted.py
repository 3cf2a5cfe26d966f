"""What `fastbrain.plan` foretells for an RTX 3060, beside what is published and measured there."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import fastbrain
from bench import published
from bench.published import StepRow
from bench.report import shapes
from bench.report.markdown import block, bullets, number, page, prose, span, table
from bench.report.results import MeasuredStep
from bench.shapes import CARD as CARD_SHAPES
from fastbrain.config import TransformerConfig
from fastbrain.plan import CARDS, Plan, known_card, plan
from fastbrain.plan.shares import simulated

COMMAND = "python -m bench.report predicted"
CARD = CARDS["rtx3060"]

# where a shape was published more than once, the newest version is the bar
_NEWEST_LAST = ("2.0", "4.0")
_CHAPTER = Path(fastbrain.__file__).parent / "configs" / "300m-moe-12gb.toml"
_MIB = 2**20

_WHAT = (
    "`fastbrain.plan` adds up what a step computes and moves, at rates that it states with their "
    "sources; our own kernels count with the time that a model of the card gives their machine "
    "code. Operands are BF16, weights and moments FP32. A prediction is not a measurement."
)
_EMPTY = (
    "Nobody has run fastbrain on this card yet, so the cells of what was measured are empty; the "
    "last section says how to fill them."
)
_WHICH_RATE = (
    "The published rate is the fastest of the newest version that was measured at the shape, on an "
    "idle card. `unfused` is the crate before flash attention and BF16 activations: such a rate is "
    "easily beaten."
)
_HOST_BOUND = "starting its operations from Python is predicted to take longer than doing them."
_WHICH_PEAK = (
    "A peak is what tensors take at the fullest moment, weights and optimizer included; a "
    "published pool is the same of the crate's allocator. The device's adds what the driver takes, "
    "and the published one the desktop as well. Checkpointed is with every block computed again in "
    "the backward pass, which the predictions are without."
)


@dataclass(frozen=True)
class Case:
    """A shape to predict, the published rows of it, and the fastest that was measured of it."""

    config: TransformerConfig
    batch: int
    seq: int
    rows: tuple[StepRow, ...] = ()
    measured: MeasuredStep | None = None

    @cached_property
    def plan(self) -> Plan:
        return plan(self.config, CARD.key, self.batch, self.seq)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for cases that cost the same."""
        return (*shapes.key(self.config), self.batch, self.seq)

    @property
    def cells(self) -> list[str]:
        return [shapes.model(self.config), shapes.batch(self.batch, self.seq)]

    @property
    def bar(self) -> StepRow | None:
        """The published row with the rate to beat: the fastest of the newest version."""
        return max(self.rows, key=_bar, default=None)


def section(measured: Sequence[MeasuredStep]) -> str:
    """Rates, peaks and memory by component; `measured` are steps of any card."""
    ours = [step for step in measured if known_card(step.device) == CARD]
    found = cases(ours)
    made = simulated()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    facts = block(
        [
            ("command", COMMAND),
            ("device", f"{CARD.name}, as `fastbrain.plan` has it"),
            ("kernels", f"machine code of {versions}"),
        ]
    )
    return page(
        [
            "## Predicted: fastbrain on an RTX 3060",
            prose(_WHAT if ours else f"{_WHAT} {_EMPTY}"),
            "### Rates (PREDICTED, beside published and measured)",
            facts,
            _rates(found),
            prose(_WHICH_RATE),
            bullets(
                f"{', '.join(case.cells)}: {_HOST_BOUND}" for case in found if case.plan.host_bound
            ),
            "### Peak memory (PREDICTED, beside published and measured)",
            facts,
            _peaks(found),
            prose(_WHICH_PEAK),
            "### The chapter's model by component (PREDICTED)",
            facts,
            _components(chapter_cases()),
            f"The card has {number(CARD.memory_bytes / _MIB)} MiB; the published figures were "
            f"taken beside a desktop of {number(_desktop_mib())} MiB.",
        ]
    ).rstrip("\n")


def cases(measured: Iterable[MeasuredStep] = ()) -> list[Case]:
    """The chapter's model, every published shape, and what is timed on a card, each once.

    `measured` are steps on the home card.
    """
    found = {case.key: case for case in chapter_cases()}
    for row in published.step_rows():
        case = Case(row.config, row.batch, row.seq, (row,))
        before = found.get(case.key)
        found[case.key] = replace(before, rows=(*before.rows, row)) if before else case
    for shape in CARD_SHAPES.values():
        case = Case(shape.config, shape.batch, shape.seq_len)
        found.setdefault(case.key, case)
    for step in measured:
        case = Case(step.config, step.batch, step.seq)
        case = found.get(case.key, case)
        slower = case.measured is None or case.measured.tokens_per_s < step.tokens_per_s
        found[case.key] = replace(case, measured=step) if slower else case
    return list(found.values())


def chapter_cases() -> list[Case]:
    """The model that the chapter builds, and the wider one that its sweep command measures."""
    model = tomllib.loads(_CHAPTER.read_text())["model"]
    built = TransformerConfig(vocab_size=32_000, **model)
    swept = replace(built, moe_d_ff=704, moe_layers=tuple(range(2, built.n_layers)))
    return [Case(built, 8, 512), Case(built, 8, 1024), Case(swept, 8, 512)]


def _bar(row: StepRow) -> tuple[bool, int, float]:
    known = row.generation in _NEWEST_LAST
    age = _NEWEST_LAST.index(row.generation) if known else -1
    rate = row.tokens_per_s
    return rate is not None, age, rate.middle if rate else 0.0


def _rates(found: Sequence[Case]) -> str:
    header = (
        "model", "batch", "PREDICTED step ms", "PREDICTED tokens/s", "PREDICTED days for 50B",
        "PREDICTED MFU %", "published tokens/s", "published days for 50B", "crate",
        "predicted / published", "measured tokens/s", "measured days for 50B",
    )  # fmt: skip
    return table(header, [_rate_row(case) for case in found])


def _rate_row(case: Case) -> list[str]:
    ours, bar, run = case.plan, case.bar, case.measured
    cells = [*case.cells, number(ours.step_ms, 1), number(ours.tokens_per_s)]
    cells += [number(ours.days(published.TOKENS), 1), number(100 * ours.mfu, 1)]
    if bar is None or bar.tokens_per_s is None:
        cells += [""] * 4
    else:
        ratio = ours.tokens_per_s / bar.tokens_per_s.middle
        cells += [span(bar.tokens_per_s), number(bar.days, 1), bar.generation, number(ratio, 2)]
    rate = run.tokens_per_s if run else None
    return [*cells, number(rate), number(rate and published.days(rate), 1)]


def _peaks(found: Sequence[Case]) -> str:
    header = (
        "model", "batch", "PREDICTED peak MiB", "published pool MiB",
        "published pool MiB, checkpointed", "measured peak MiB",
        "PREDICTED device MiB", "published device MiB",
    )  # fmt: skip
    return table(header, [_peak_row(case) for case in found])


def _peak_row(case: Case) -> list[str]:
    peaks = [row.peak_mib for row in case.rows]
    device = [row.device_peak_mib for row in case.rows if row.device_peak_mib is not None]
    run = case.measured.peak_bytes if case.measured else None
    return [
        *case.cells,
        number(case.plan.memory.peak_bytes / _MIB),
        number(next((p.kept for p in peaks if p.kept is not None), None)),
        number(next((p.checkpointed for p in peaks if p.checkpointed is not None), None)),
        number(run and run / _MIB),
        number(case.plan.memory.needed_bytes / _MIB),
        number(device[0] if device else None),
    ]


def _components(found: Sequence[Case]) -> str:
    parts = dict.fromkeys(name for case in found for name in case.plan.memory.parts)
    rows = [
        [f"{name}, MiB", *(number(case.plan.memory.parts.get(name, 0) / _MIB) for case in found)]
        for name in parts
    ]
    rows += [["**peak, MiB**", *(number(case.plan.memory.peak_bytes / _MIB) for case in found)]]
    times = [case.plan.ms_by_part() for case in found]
    rows += [[f"{name}, ms", *(number(each[name], 1) for each in times)] for name in times[0]]
    rows += [["**step, ms**", *(number(case.plan.step_ms, 1) for case in found)]]
    return table(["PREDICTED", *(", ".join(case.cells) for case in found)], rows)


def _desktop_mib() -> float:
    return max(row.desktop_mib or 0 for row in published.step_rows())
