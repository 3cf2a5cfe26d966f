"""The published figures, held to each other: what one column says follows from the others."""

from itertools import pairwise

import pytest

from bench import published
from bench.published import StepRow, kernel_tables, step_rows

ROWS = step_rows()
# the crate's count of operations: the embedding counts, and attention is not halved
PEAK_FLOPS = published.card().tensor_tflops * 1e12

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def flops_per_token(row: StepRow) -> int:
    active = row.config.parameter_counts().active
    return 6 * active + 12 * row.config.n_layers * row.seq * row.config.d_model


def row_of(name: str) -> StepRow:
    [found] = [row for row in ROWS if row.id == name]
    return found


@every_row
def test_parameters_are_those_of_the_shape(row):
    counts = row.config.parameter_counts()
    for printed, count in (
        (row.printed.total_m, counts.total),
        (row.printed.active_m, counts.active),
    ):
        if printed is not None:
            assert round(count / 1e6, 1) == printed


@every_row
def test_days_follow_from_the_rate(row):
    if row.printed.days_50b is not None:
        assert round(row.days, 1) == row.printed.days_50b


@every_row
def test_tflops_and_mfu_follow_from_the_rate(row):
    if row.printed.tflops is None:
        return
    flops = row.tokens_per_s.middle * flops_per_token(row)
    # the source rounded on the way; a row that does not fit is off by an eighth
    fits = flops / 1e12 == pytest.approx(row.printed.tflops, rel=0.002)
    assert fits == row.printed.formula_fits
    if fits:
        assert 100 * flops / PEAK_FLOPS == pytest.approx(row.printed.mfu_percent, rel=0.003)


def test_one_row_is_known_not_to_fit():
    odd = [row.id for row in ROWS if not row.printed.formula_fits]
    assert odd == ["sweep-moe-v32000-128x128"]
    assert 8.8 < row_of(odd[0]).tokens_per_s.middle * flops_per_token(row_of(odd[0])) / 1e12 < 8.85


@every_row
def test_a_row_is_whole(row):
    assert row.source.startswith("reference crate, ")
    assert row.generation
    assert row.tokens_per_s or row.contended_tokens_per_s or row.peak_mib.kept
    for span in (row.tokens_per_s, row.step_ms, row.contended_tokens_per_s, row.checkpointed_ms):
        assert span is None or 0 < span.low <= span.high
    if row.tokens_per_s is not None:
        assert row.step_ms.low * row.tokens_per_s.high == pytest.approx(row.tokens * 1e3)


def test_names_are_unique():
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len({each.table for each in kernel_tables()}) == len(kernel_tables())


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.table == "sweep"], ids=lambda row: row.id
)
def test_the_sweep_derives_its_widths_as_the_crate_does(row):
    c = row.config
    d = c.d_model
    assert (c.head_dim, c.n_heads, c.n_kv_heads) == (64, d // 64, d // 64 // 4)
    assert c.d_ff == d * 11 // 4
    if c.moe_layers:
        assert (c.moe_d_ff, c.num_experts, c.experts_per_token) == (d * 11 // 16, 8, 2)
        assert c.moe_layers == tuple(range(2, c.n_layers))


def test_contention_slows_by_what_the_source_says():
    row = row_of("sweep-moe-v32000-16x512")
    ratio = row.tokens_per_s.middle / row.contended_tokens_per_s.middle
    assert round(ratio, 2) == row.printed.contended_ratio


def test_ratios_to_pytorch_are_those_printed():
    rows = [row for row in ROWS if row.table == "frameworks" and row.peers.pytorch]
    assert [round(row.tokens_per_s.middle / row.peers.pytorch, 2) for row in rows] == [
        1.36,
        1.34,
        1.23,
        1.06,
        1.07,
    ]
    assert all(row.peers.pytorch_valid for row in rows)
    before = [row for row in ROWS if row.table == "frameworks-before"]
    assert len(before) == 5
    assert not any(row.peers.pytorch_valid for row in before)


def test_every_gain_of_the_history_is_the_one_printed():
    names = ["history-bf16-activations", "history-bf16-qkv", "history-residual-in-norm-backward"]
    names += ["history-operand-copy", "history-bf16-output-gradient"]
    names += ["history-residual-in-norm-forward", "history-no-memset"]
    rates = [row_of("history-flash").tokens_per_s.middle]
    rates += [row_of(name).tokens_per_s.middle for name in names]
    gains = [after / before for before, after in pairwise(rates)]
    printed = [1.067, 1.016, 1.017, 1.006, 1.014, 1.008, 1.020]
    # a gain is of two builds in turns, on a day of its own
    assert gains == pytest.approx(printed, abs=0.004)


def test_more_tokens_need_more_memory():
    rows = sorted((r for r in ROWS if r.table == "default-moe"), key=lambda row: row.tokens)
    kept = [row.peak_mib.kept for row in rows]
    # what a batch of 4,096 tokens needs does not depend on how it is cut
    assert kept == [1508, 2037, 2037, 2037, 2843]
    # 806 MiB, and 102 with every block checkpointed, for 4,096 tokens more
    large, small = rows[-1].peak_mib, rows[1].peak_mib
    assert large.kept - small.kept == 806
    assert large.checkpointed - small.checkpointed == 102


@pytest.mark.parametrize("each", kernel_tables(), ids=lambda each: each.table)
def test_kernels_do_not_exceed_their_step(each):
    whole = each.kernels_ms or each.step_ms
    names = {row.name for row in each.rows}
    assert all(row.part_of in names for row in each.rows if row.part_of)
    assert sum(row.ms for row in each.rows if not row.part_of) <= whole.high * 1.001
    for row in each.rows:
        if row.share_percent is not None:
            assert 100 * row.ms / whole.middle == pytest.approx(row.share_percent, abs=0.6)


def test_the_last_run_of_the_dense_model_is_the_sum_of_its_kernels():
    [final] = [each for each in kernel_tables() if each.table == "dense-102m-final"]
    row = row_of("history-no-memset")
    assert row.step_ms.middle == pytest.approx(final.kernels_ms.middle, rel=0.005)


def test_the_products_of_the_default_moe_hold_the_head():
    [each] = [each for each in kernel_tables() if each.table == "default-moe-4.0"]
    [products] = [row for row in each.rows if row.name == "products but the routed experts'"]
    c = each.config
    moe = len(c.moe_layers)
    attention = c.d_model * c.head_dim * 2 * (c.n_heads + c.n_kv_heads)
    weights = c.n_layers * attention + 3 * c.d_model * (
        (c.n_layers - moe) * c.d_ff + moe * c.moe_d_ff
    )
    flops = 6 * each.batch * each.seq * (weights + c.vocab_size * c.d_model)
    assert products.ms / 1e3 * products.tflops * 1e12 == pytest.approx(flops, rel=0.01)
