"""A table of benchmarks: who is ours, who is the fastest peer, and what did not run."""

from xml.sax.saxutils import quoteattr

import pytest

from fastbrain.commands.bench_rows import Row, collected, table


def report(*cases: tuple[str, str]) -> str:
    """JUnit XML of (name, what happened inside) pairs."""
    inside = (f"<testcase name={quoteattr(name)}>{what}</testcase>" for name, what in cases)
    return f"<testsuites><testsuite>{''.join(inside)}</testsuite></testsuites>"


def timed(name: str, median_s: float, **extra: float) -> dict:
    return {"name": name, "stats": {"median": median_s}, "extra_info": extra}


@pytest.mark.parametrize(
    ("ms", "ours", "peer", "ratio"),
    [
        # the kernels count where they ran, even if their definition was faster
        ({"fused": 2.0, "reference": 1.0, "SDPA": 4.0, "Flex": 3.0}, "fused", "Flex", 1.5),
        ({"reference": 1.0, "SDPA": 0.5}, "reference", "SDPA", 0.5),
        ({"fastbrain": 3.0, "fastbrain graphs": 2.0, "x": 1.0}, "fastbrain graphs", "x", 0.5),
        ({"fused": 1.0, "reference": 2.0}, "fused", None, None),
        ({"SDPA": 1.0}, None, "SDPA", None),
        ({}, None, None, None),
    ],
)  # fmt: skip
def test_ours_is_held_against_the_fastest_peer(ms, ours, peer, ratio):
    row = Row("a case", ms)
    assert (row.ours, row.peer, row.ratio) == (ours, peer, ratio)
    assert row.document()["ratio"] == ratio


def test_rows_have_what_ran_and_what_did_not():
    benchmarks = [
        timed("bench_a[x, 25% forward+backward-fused]", 0.002, bytes=8e6, flops=0.0, peak_bytes=7),
        timed("bench_a[x, 25% forward+backward-SDPA]", 0.004, bytes=8e6, flops=0.0),
        timed("bench_b[y-z-fastbrain]", 0.5, tokens=100),
    ]
    rows, broken = collected(
        benchmarks,
        report(
            ("bench_a[x, 25% forward+backward-fused]", ""),
            ("bench_b[y-z-fastbrain]", ""),
            ("bench_a[x, 25% forward+backward-SDPA]", ""),
            ("bench_a[x, 25% forward+backward-Liger]", '<skipped message="not here"/>'),
            ("bench_b[y-z-llama]", '<failure message="E1&#10;E2"/>'),
            ("bench.bench_c", '<error message="collection failure"/>'),
        ),
    )
    first, second = rows
    assert first.name == "x, 25% forward+backward"
    assert first.ms == {"fused": 2.0, "SDPA": 4.0}
    assert (first.bytes, first.peak_bytes) == (8e6, {"fused": 7})
    assert first.skipped == {"Liger": "not here"}
    assert (second.name, second.ms, second.tokens) == ("y-z", {"fastbrain": 500.0}, 100)
    assert second.failed == {"llama": "E1"}
    assert broken == ["bench.bench_c: collection failure"]


def test_a_cards_own_events_are_the_time():
    name = "bench_a[x-fused]"
    (row,), _ = collected([timed(name, 0.002, event_ms=1.25)], report((name, "")))
    assert row.ms == {"fused": 1.25}


def test_what_failed_after_it_was_timed_has_no_time():
    name = "bench_a[x-fused]"
    (row,), _ = collected([timed(name, 0.002)], report((name, '<failure message="wrong ids"/>')))
    assert row.ms == {}
    assert row.failed == {"fused": "wrong ids"}


def test_the_table_says_it_all():
    rows = [
        Row("product", {"fused": 2.0, "peer": 3.0}, {"fused": 3 << 20}, flops=8e12),
        Row("copy", {"fused": 1.0}, skipped={"peer": "no card"}, bytes=3e9),
        Row("small", {"reference": 4.0}, failed={"peer": "broken"}, bytes=4e3),
        Row("step", {"fastbrain": 10.0, "llama": 5.0}, tokens=1000.0),
    ]
    text = [" ".join(line.split()) for line in table(rows).splitlines()]
    assert text == [
        "median ms rate peak MiB",
        "product",
        "fused 2.0000 4,000.0 TFLOPS 3 1.50 x peer",
        "peer 3.0000 2,666.7 TFLOPS",
        "copy",
        "fused 1.0000 3,000.0 GB/s",
        "peer skipped: no card",
        "small",
        "reference 4.0000 1.0 MB/s",
        "peer FAILED: broken",
        "step",
        "fastbrain 10.0000 100,000 tok/s 0.50 x llama",
        "llama 5.0000 200,000 tok/s",
    ]
