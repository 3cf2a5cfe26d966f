"""A distributed model is the one that a single process has: updates, norms, bytes, answers."""

from functools import cache
from itertools import pairwise

import pytest
from model_jobs import OPTIMIZERS
from ranks import needs_fork, results

pytestmark = needs_fork

WAYS = ("ddp", "fsdp")
slow = pytest.mark.slow


@cache
def found(job: str, *arguments, ranks: int = 2) -> list:
    """What a job returned in every rank; tests look at it and write nothing."""
    given = [list(each) if isinstance(each, tuple) else each for each in arguments]
    return results(f"model_jobs:{job}", *given, ranks=ranks)


EVERY = tuple(OPTIMIZERS)
UPDATES = [
    pytest.param("ddp", "moe", ("adam", "lion"), False, False, 2, id="ddp-moe"),
    pytest.param("fsdp", "moe", EVERY, True, False, 2, id="fsdp-moe-bf16"),
    pytest.param("fsdp", "moe", ("adam",), True, True, 2, id="fsdp-moe-bf16-lora", marks=slow),
    pytest.param("ddp", "moe", ("adam",), True, True, 2, id="ddp-moe-bf16-lora", marks=slow),
    pytest.param("ddp", "dense", EVERY, True, False, 4, id="ddp-4-dense-bf16", marks=slow),
    pytest.param("fsdp", "moe", EVERY, False, False, 4, id="fsdp-4-moe", marks=slow),
    pytest.param("fsdp", "dense", EVERY, False, False, 4, id="fsdp-4-dense", marks=slow),
]


@pytest.mark.parametrize(("parallel", "shape", "kinds", "bf16", "lora", "ranks"), UPDATES)
class TestUpdates:
    """Both get a gradient that is the same to the bit, and both begin with moments."""

    def every(self, parallel, shape, kinds, bf16, lora, ranks):
        reports = found("updates", parallel, shape, kinds, bf16, lora, ranks=ranks)
        return [(kind, each) for report in reports for kind, each in report.items()]

    def test_an_update_is_that_of_one_process(self, parallel, shape, kinds, bf16, lora, ranks):
        for kind, report in self.every(parallel, shape, kinds, bf16, lora, ranks):
            assert report["begun"], kind
            # where a part ends decides which of its values are computed one by one
            assert report["plain"] <= (0.0 if parallel == "ddp" else 2e-7), kind
            assert report["steps"][0] == report["steps"][1] == 5

    def test_the_norm_is_that_of_all_parts(self, parallel, shape, kinds, bf16, lora, ranks):
        for kind, report in self.every(parallel, shape, kinds, bf16, lora, ranks):
            assert max(report["norms"]) <= 3e-7, kind
            assert report["halved"] == 0.0
            assert report["clipped_to"] > 0.02  # clipping did have something to do
            assert report["clipped"] <= 4e-7, kind

    def test_a_skip_changes_nothing(self, parallel, shape, kinds, bf16, lora, ranks):
        for kind, report in self.every(parallel, shape, kinds, bf16, lora, ranks):
            assert report["skipped"] == [], kind
            assert report["left"] == 0.0


def test_replicas_send_gradients_once_a_step():
    for one, four in found("collectives", "ddp", "moe"):
        assert one == four == [{"allreduce": 1}, {}]


def test_the_buckets_of_replicas_are_cut_for_good_before_the_first_step():
    # they decide in which order values are added, and so whether a resumed run has the same bits
    for report in found("gathers", "ddp", "dense", False, ranks=2):
        assert report["cut anew"] is False


def test_parts_are_gathered_and_their_gradients_sent_in_every_micro_batch():
    # two blocks for forward and backward, and what is outside of them once
    sent = {"allgather_base": 5, "reduce_scatter_base": 3}
    for one, four in found("collectives", "fsdp", "moe"):
        assert one == [sent, {"allreduce": 1}]
        assert four == [{name: 4 * count for name, count in sent.items()}, {"allreduce": 1}]


@pytest.mark.parametrize(
    ("ranks", "share", "bf16"),
    [
        (2, 0.6, True),
        pytest.param(4, 0.35, True, marks=slow),
        pytest.param(2, 0.6, False, marks=slow),
    ],
)
def test_a_rank_has_its_share_of_weights_gradients_and_moments(ranks, share, bf16):
    for report in found("memory", bf16, "fsdp", ranks=ranks):
        whole = 4 * report["parameters"]
        for when, held in report["held"].items():
            gradients = 0 if when != "backward" else share * whole
            limits = [share * whole, gradients, share * whole, share * whole]
            assert all(0 <= has <= limit for has, limit in zip(held, limits, strict=True)), when
            assert held[0] >= whole / ranks
            # and nothing else is alive: neither what was gathered nor a shadow
            assert report["alive"][when] <= sum(held) + whole / 100, when


def test_no_shadow_of_a_part_waits_for_backward_or_outlives_a_step():
    for report in found("memory", True, "fsdp", ranks=2):
        assert report["cast"] >= 27  # nine products, twice forward, once scored
        assert report["waiting"] == [0, 0]
        assert report["left"] == report["kept"] == 0


EVALUATED = {
    "dense-bf16": ("dense", True, False),
    "moe-bf16-lora": ("moe", True, True),
    "moe-f32-lora": ("moe", False, True),
}
# what is folded or cast once and kept is of no use after an update
EVALUATIONS = [
    pytest.param("fsdp", ("dense-bf16", "moe-bf16-lora"), id="fsdp"),
    pytest.param("ddp", tuple(EVALUATED), id="ddp", marks=slow),
    pytest.param("fsdp", ("moe-f32-lora",), id="fsdp-f32", marks=slow),
]


@pytest.mark.parametrize(("parallel", "cases"), EVALUATIONS)
def test_an_evaluation_sees_the_newest_weights(parallel, cases):
    first, second = found("evaluations", parallel, tuple(EVALUATED[case] for case in cases))
    for case, ours, theirs in zip(cases, first, second, strict=True):
        assert ours["losses"] == ours["of_gathered"] == theirs["losses"], case
        assert all(abs(a - b) > 1e-3 for a, b in pairwise(ours["losses"])), case
        # a part is gathered anew every time, so what was made from it is only in the way
        assert parallel == "ddp" or ours["kept"] == theirs["kept"] == 0, case


@pytest.mark.parametrize(
    ("parallel", "shape", "lora", "ranks"),
    [
        ("fsdp", "moe", True, 2),
        ("ddp", "dense", False, 2),
        pytest.param("fsdp", "moe", False, 4, marks=slow),
        pytest.param("fsdp", "dense", True, 4, marks=slow),
    ],
)
def test_a_model_gathered_is_the_one_that_was_distributed(parallel, shape, lora, ranks):
    first, *others = found("gathers", parallel, shape, lora, ranks=ranks)
    assert [each["found"] for each in (first, *others)] == [True] + [False] * (ranks - 1)
    assert first["differing"] == []
    assert first["step"] == [2, 2]
    assert first["warm"]
    assert first["precision"] is False
    for each in (first, *others):
        assert each["held"] == []
        assert each["parallel"] == parallel
        assert each["sharded"] == (parallel == "fsdp")
    if parallel == "fsdp":
        assert first["moments"] is False


def test_what_a_distributed_model_cannot_do_is_refused_with_the_way_out():
    for parallel, shape, lora in (("ddp", "dense", False), ("fsdp", "moe", True)):
        for report in found("gathers", parallel, shape, lora, ranks=2):
            refused = dict(report["refused"])
            assert refused.pop("word") == 'parallel must be "ddp" or "fsdp", got \'both\''
            for method in ("distribute", "to_cuda", "to_cpu", "add_lora", "merge_lora"):
                assert refused.pop(method) == (
                    f"{method}: this model is distributed over 2 ranks; call it before distribute"
                )
            if parallel == "ddp":
                assert not refused  # a replica is whole: it has weights, and answers
                continue
            reads = {"weights", "gradients", "moments", "decoder", "generate", "generate_batch"}
            assert refused.keys() == reads
            assert all("gathered(), called on every rank" in each for each in refused.values())
