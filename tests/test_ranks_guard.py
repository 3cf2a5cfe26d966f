"""What is not a number on one rank costs all of them the same step, and nothing else."""

from itertools import product
from pathlib import Path

import pytest
from ranks import needs_fork, results
from training_runs import bits, entered

from fastbrain.training import guard_log, metrics

pytestmark = needs_fork

STEPS, BAD = 6, 2
SETTINGS = [
    "train.micro_batch_size=2", "train.global_batch_size=8", "save.interval_steps=6",
    "eval.interval=6", "eval.samples=0",
]  # fmt: skip
CASES = {
    "dense-f32": [],
    "moe-bf16": ["model.moe_layers=[1]", "train.precision=bf16-mixed"],
}
# a rank, which of its two micro-batches, what, and the value; the first is micro 2 of 4
QUICK = [(1, 0, "loss", "nan"), (0, 1, "last", "-inf")]
EVERY = [
    (rank, micro, where, ("nan", "inf", "-inf")[count % 3])
    for count, (rank, micro, where) in enumerate(product((0, 1), (0, 1), ("loss", "first", "last")))
]


@pytest.fixture(autouse=True)
def home(tmp_path):
    with entered(tmp_path) as folder:
        yield folder


def assert_one_skip(name: str) -> dict:
    [row] = guard_log.read(Path(name, "guard.jsonl"))
    assert (row["kind"], row["step"], row["data_step"]) == ("skip", BAD + 1, BAD)
    rows = [row for row in metrics.read(Path(name, "metrics.jsonl")) if "loss" in row]
    assert [row["skipped"] for row in rows] == [int(i >= BAD) for i in range(STEPS)]
    return row


def check(parallel: str, case: str, places: list, ranks: int = 2) -> None:
    options = [*SETTINGS, *CASES[case], f"train.parallel={parallel}"]
    if ranks == 4:
        options.append("train.global_batch_size=16")
    found = results("agreement_jobs:guarded", options, BAD, places, ranks=ranks)
    assert not guard_log.read(Path("left-out/guard.jsonl"))
    expected = bits("left-out", STEPS)
    for index, (rank, micro, where, _) in enumerate(places):
        row = assert_one_skip(f"spoiled-{index}")
        assert bits(f"spoiled-{index}", STEPS) == expected
        if where == "loss":
            assert row["micro"] == 2 * rank + micro
        else:
            assert row["grad_norm"] is None
        for left_out, *spoiled in found:
            each = spoiled[index]
            assert (each["code"], each["skipped"], each["updates"]) == (0, 1, STEPS - 1)
            assert each["checksum"] == left_out["checksum"]
    if parallel == "ddp":
        assert len({of_rank[-1]["checksum"] for of_rank in found}) == 1


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_all_ranks_skip_the_step_that_is_not_a_number_on_one(parallel):
    check(parallel, "dense-f32", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_rank_micro_batch_and_tensor_may_be_spoiled(parallel, case):
    check(parallel, case, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_skip_together(parallel):
    check(
        parallel,
        "moe-bf16",
        [*QUICK, (1, 0, "first", "inf"), (3, 1, "first", "nan"), (3, 0, "loss", "inf")],
        ranks=4,
    )
