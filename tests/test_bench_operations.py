"""What is raced is the same thing: every peer computes what the definition does."""

from pathlib import Path

import pytest
import torch

from bench import operations, timing
from bench.operations import OPERATIONS, TOY
from bench.operations.case import Ways
from fastbrain.errors import Cuda

BENCH = Path(operations.__file__).parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# others round to BF16, whose steps are 2**-8, and some peers more often than we do
CLOSE = {"adam": 1e-4, "grad_norm": 1e-6}


def values(operation: str, number: int, name: str) -> list[torch.Tensor]:
    """What a contender computes in one of an operation's cases, on inputs of its own."""
    torch.manual_seed(0)
    case = list(OPERATIONS[operation](TOY, DEVICE))[number]
    torch.manual_seed(1)  # of incoming gradients
    found = case.contenders[name]()
    found = found if isinstance(found, tuple) else (found,)
    return [x.float() for x in found if x.is_floating_point()]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_contenders_compute_the_same(operation):
    for number, case in enumerate(OPERATIONS[operation](TOY, DEVICE)):
        expected = values(operation, number, "reference")
        assert expected
        for name in case.contenders:
            found = values(operation, number, name)
            for ours, theirs in zip(found, expected, strict=True):
                apart = (ours - theirs).norm() / theirs.norm()
                assert apart < CLOSE.get(operation, 2**-6), (case.name, name)


def test_every_operation_has_a_file_and_every_row_a_name():
    for name, build in OPERATIONS.items():
        assert f'OPERATIONS["{name}"]' in (BENCH / f"bench_{name}.py").read_text()
        rows = timing.rows(build)
        for row in rows:
            assert row.id.rpartition("-")[::2] == tuple(row.values)
        assert len({row.id for row in rows}) == len(rows)
        contenders = {row.values[1] for row in rows}
        assert {"fused", "reference"} < contenders, "there is no peer"


def test_all_cases_come_with_and_without_peers():
    everyone = list(operations.cases(TOY, DEVICE))
    ours = list(operations.cases(TOY, DEVICE, peers=False))
    assert [case.name for case in everyone] == [case.name for case in ours]
    assert all(set(case.contenders) == {"fused", "reference"} for case in ours)
    assert all(case.bytes > 0 for case in everyone)
    assert len({case.name for case in everyone}) == len(everyone)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), Cuda("2 GiB\nremedies")])
def test_what_does_not_fit_the_card_is_skipped(error):
    with (
        pytest.raises(pytest.skip.Exception, match=r"out of memory on this card \(2 GiB\)"),
        timing.where_there_is_room(),
    ):
        raise error


def test_a_peer_that_is_missing_is_no_contender():
    ways = Ways()
    ways.add("here", torch.zeros, ())
    ways.add("there", torch.zeros, (), "it is elsewhere")
    case = ways.forward("a case", 1.0, 2.0)
    assert list(case.contenders) == ["here"]
    assert case.absent == {"there": "it is elsewhere"}
    assert (case.bytes, case.flops) == (1.0, 2.0)
