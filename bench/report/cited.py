"""What the reference crate publishes for the RTX 3060, as tables with their sources."""

from collections.abc import Iterable, Sequence

from bench import published
from bench.published import KernelTable, Range, StepRow
from bench.report import shapes
from bench.report.markdown import block, bullets, number, page, prose, span, table

COMMAND = "python -m bench.report published"

_WHAT = (
    "The crate that fastbrain follows is measured on one RTX 3060, with BF16 operands. The figures "
    "are its own; days are computed here from its rates, and so is a rate or a time beside the one "
    "that is printed. They are the bar on that card, and say nothing of fastbrain."
)
_FRAMEWORKS = (
    "PyTorch had torch.compile, FP16 autocast with a gradient scaler, Adam that is not fused, and "
    "keys and values copied for every query head; TensorFlow had XLA and no fused attention. "
    "Neither is the fastest that its framework can do."
)

# tables of `published.toml` in the order of the page
_TITLES = {
    "sweep": "Shapes (PUBLISHED; before flash attention and BF16 activations)",
    "frameworks": "Three frameworks, 101.7M dense (PUBLISHED)",
    "frameworks-before": "Three frameworks, before flash attention (PUBLISHED)",
    "history-2.0": "How the 101.7M dense model got faster, 4 x 1024 (PUBLISHED)",
    "default-moe": "The default MoE in version 4.0.0 (PUBLISHED)",
    "history-4.0": "How the default MoE got faster, 4 x 1024 (PUBLISHED)",
    "archive": "Older measurements (PUBLISHED)",
}


def section() -> str:
    """Everything published, one table after another."""
    parts = [
        "## Published: the reference crate on an RTX 3060",
        prose(_WHAT),
        _facts(row.source for row in published.step_rows()),
        _models(),
    ]
    for name in _TITLES:
        parts += _steps(name)
        if name == "sweep":
            parts += [_contention()]
    parts += ["### Kernels of one step (PUBLISHED)"]
    for each in published.kernel_tables():
        parts += _kernels(each)
    return page(parts).rstrip("\n")


def rows_of(name: str) -> list[StepRow]:
    """The published rows of one table."""
    return [row for row in published.step_rows() if row.table == name]


def contended_pairs() -> list[tuple[StepRow, float]]:
    """Rows with an idle and a contended rate, and how many times faster the idle one is."""
    return [
        (row, row.tokens_per_s.middle / row.contended_tokens_per_s.middle)
        for row in published.step_rows()
        if row.tokens_per_s is not None and row.contended_tokens_per_s is not None
    ]


def _models() -> str:
    configs = dict.fromkeys(row.config for row in published.step_rows())
    return table(shapes.HEADER, [shapes.row(config) for config in configs])


def _facts(sources: Iterable[str]) -> str:
    card = published.card()
    facts = [("command", COMMAND), ("device", card.name), ("machine", card.machine)]
    return block(facts + [("source", source) for source in dict.fromkeys(sources)])


def _steps(name: str) -> list[str]:
    rows = rows_of(name)
    tables = {
        "sweep": _sweep,
        "frameworks": _frameworks,
        "frameworks-before": _frameworks,
        "default-moe": _default_moe,
    }
    parts = [f"### {_TITLES[name]}", _facts(row.source for row in rows)]
    parts += [tables.get(name, _history)(rows)]
    if name == "frameworks":
        parts += [prose(_FRAMEWORKS)]
    notes = [f"{_label(row)}: {row.note}." for row in rows if row.note]
    return [*parts, bullets(notes)]


def _label(row: StepRow) -> str:
    """How a note below a table names its row."""
    if row.table in ("history-2.0", "history-4.0"):
        return row.generation
    batch = shapes.batch(row.batch, row.seq)
    if row.table in ("frameworks", "default-moe"):
        return f"{batch} at {span(row.tokens_per_s)} tokens/s"
    return f"{shapes.model(row.config)}, {batch}"


def _sweep(rows: Sequence[StepRow]) -> str:
    header = (
        "model", "batch", "tokens/s", "days for 50B", "TFLOPS", "MFU %", "tokens/s, contended",
        "slower by", "peak MiB of the device",
    )  # fmt: skip
    slower = {row.id: ratio for row, ratio in contended_pairs()}
    return table(
        header,
        [
            [
                shapes.model(row.config),
                shapes.batch(row.batch, row.seq),
                span(row.tokens_per_s),
                number(row.days, 1),
                number(row.printed.tflops, 2),
                number(row.printed.mfu_percent, 1),
                span(row.contended_tokens_per_s),
                f"{slower[row.id]:.2f}x" if row.id in slower else "",
                number(row.device_peak_mib),
            ]
            for row in rows
        ],
    )


def _frameworks(rows: Sequence[StepRow]) -> str:
    valid = all(row.peers.pytorch_valid for row in rows)
    columns = ["crate, tokens/s", "days for 50B", "TensorFlow, tokens/s", "days for 50B"]
    # a whole model cast to FP16 did not train: its loss was not a number
    columns += ["PyTorch, tokens/s" if valid else "PyTorch, tokens/s (INVALID: its loss was NaN)"]
    columns += ["days for 50B", "crate / PyTorch"] if valid else []
    return table(["batch", *columns], [_frameworks_row(row, valid) for row in rows])


def _frameworks_row(row: StepRow, valid: bool) -> list[str]:
    peers, ours = row.peers, row.tokens_per_s
    cells = [shapes.batch(row.batch, row.seq), span(ours), number(row.days, 1)]
    cells += [number(peers.tensorflow), number(_days(peers.tensorflow), 1), number(peers.pytorch)]
    if not valid:
        return cells
    ratio = ours.middle / peers.pytorch if ours and peers.pytorch else None
    return [*cells, number(_days(peers.pytorch), 1), number(ratio, 2)]


def _default_moe(rows: Sequence[StepRow]) -> str:
    header = (
        "batch", "step ms", "tokens/s, derived", "days for 50B", "peak pool MiB",
        "step ms, blocks checkpointed", "days for 50B, checkpointed", "peak pool MiB, checkpointed",
    )  # fmt: skip
    return table(
        header,
        [
            [
                shapes.batch(row.batch, row.seq),
                span(row.step_ms, 1),
                span(row.tokens_per_s),
                number(row.days, 1),
                number(row.peak_mib.kept),
                span(row.checkpointed_ms, 1),
                number(_days(_rate(row, row.checkpointed_ms)), 1),
                number(row.peak_mib.checkpointed),
            ]
            for row in rows
        ],
    )


def _history(rows: Sequence[StepRow]) -> str:
    many = len({row.model for row in rows}) > 1
    contended = any(row.contended_tokens_per_s for row in rows)
    kernels = any(row.kernels_ms for row in rows)
    header = ["model", "batch"] if many else []
    header += ["crate", "tokens/s", "days for 50B"]
    header += ["tokens/s, contended", "days for 50B, contended"] if contended else []
    header += ["kernels, ms"] if kernels else []
    cells = []
    for row in rows:
        busy = row.contended_tokens_per_s
        line = [shapes.model(row.config), shapes.batch(row.batch, row.seq)] if many else []
        line += [row.generation, span(row.tokens_per_s), number(row.days, 1)]
        line += [span(busy), number(_days(busy.middle if busy else None), 1)] if contended else []
        cells.append(line + ([span(row.kernels_ms, 1)] if kernels else []))
    return table(header, cells)


def _days(rate: float | None) -> float | None:
    return None if rate is None else published.days(rate)


def _rate(row: StepRow, ms: Range | None) -> float | None:
    return None if ms is None else row.tokens / ms.middle * 1e3


def _contention() -> str:
    job = published.contention()
    ratios = [ratio for _, ratio in contended_pairs()]
    return page(
        [
            "#### Contended against idle",
            prose(
                "The contended rates above are of the same shapes while another program held "
                f"{number(job.other_job_mib)} MiB and {job.other_job_percent}% of the GPU: "
                f"{min(ratios):.2f} to {max(ratios):.2f} times slower, and "
                f"{job.out_of_memory_shapes} shapes ran out of memory ({job.note}). Two programs "
                "take turns on the multiprocessors, so each gets about half of them; they also "
                "evict each other's L2, share the bus to memory and heat the card, so each gets "
                "less than half."
            ),
            prose(_turns()),
            prose(
                "So a rate is worth writing down only from an idle card. `python -m "
                "fastbrain.sweep_arch` warns when another process uses the GPU or when the clock "
                "is below its boost clock; `nvidia-smi` names the process. A browser or a desktop "
                "counts."
            ),
        ]
    ).rstrip("\n")


def _turns() -> str:
    """The pair of designs that was measured on a busy card and on an idle one."""
    rows = {row.id: row for row in published.step_rows()}
    busy = rows["history-three-kernel-contended"], rows["history-flash-contended"]
    idle = rows["unfused-dense-102m-4x1024"], rows["history-flash"]
    slow, fast = (row.contended_tokens_per_s or _missing(row) for row in busy)
    before, after = (row.tokens_per_s or _missing(row) for row in idle)
    return (
        "A ratio survives where a rate does not. Under the same load, flash attention took the "
        f"101.7M dense model from {span(slow)} tokens/s to {span(fast)}, "
        f"{fast.middle / slow.middle:.2f} times as many; on an idle card, from {span(before)} to "
        f"{span(after)}, {after.middle / before.middle:.2f} times. So what is compared on this "
        "page takes turns in one process."
    )


def _missing(row: StepRow) -> Range:
    raise ValueError(f"published.toml lacks the rate of {row.id}")


def _kernels(each: KernelTable) -> list[str]:
    where = f"{shapes.model(each.config)}, {shapes.batch(each.batch, each.seq)}: {each.generation}"
    sums = [("kernels", each.kernels_ms), ("step", each.step_ms)]
    text = ", ".join(f"{name} {span(value, 1)} ms" for name, value in sums if value)
    total = each.kernels_ms or each.step_ms  # for shares that the source does not give
    rows = [
        [
            row.name,
            number(row.ms, 2),
            number(row.share_percent or (total and 100 * row.ms / total.middle), 1),
            number(row.launches),
            number(row.tflops, 1),
            number(row.gb_per_s),
            f"counted in: {row.part_of}" if row.part_of else row.note,
        ]
        for row in each.rows
    ]
    header = ("kernel", "ms", "% of the step", "launches", "TFLOPS", "GB/s", "note")
    note = f" {each.note[0].upper()}{each.note[1:]}." if each.note else ""
    return [prose(f"{where}; {text}.{note}"), _facts([each.source]), table(header, rows)]
