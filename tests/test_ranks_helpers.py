"""Ranks tell each other numbers and documents to the bit, and notice when one is gone."""

import math
import re

import pytest
import torch
from helper_jobs import TOLD
from ranks import needs_fork, results

from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import RankLost, Ranks, hearing

pytestmark = needs_fork


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_hear_the_same(ranks):
    found = results("helper_jobs:helpers", ranks=ranks)
    size = len(found)
    for index, each in enumerate(found):
        assert each["called"] == ([0] if index == 0 else [])
        assert each["told"] == [x.hex() if isinstance(x, float) else x for x in TOLD]
        assert each["empty"] is None
        assert each["add"][0] == size * (size + 1) / 2
        assert each["add"][1] == pytest.approx(0.1 + 0.2 * (size - 1), rel=1e-15)
        assert each["add"][2] == 2.0**53 - 1
        assert each["nan"] == "nan"
        assert each["lowest"] == 8 - size
        assert each["highest"] == 2**40 + size - 1
        assert each["sum"] == [size * (size + 1) / 2, size]
        assert each["in place"]
        assert each["leads"] == (index == 0)
        assert each["where"] == [index, size, size, "cpu"]


@pytest.mark.parametrize(
    "how", ["step", *(pytest.param(how, marks=pytest.mark.slow) for how in ("first", "add", "sum"))]
)
def test_a_rank_that_is_gone_is_an_error_that_says_so(how):
    *others, last = results("helper_jobs:missing", how)
    assert last == "gone"
    for said in others:
        assert said.startswith("another process of this run has ended, does not answer, or makes")


def test_alone_everything_is_at_once():
    ranks = Ranks.alone()
    ranks.barrier()
    ranks.leave()
    object_of_no_json = object()
    assert ranks.first(lambda: object_of_no_json) is object_of_no_json
    assert ranks.add([1.5, 2]) == [1.5, 2]
    assert ranks.lowest(3) == ranks.highest(3) == 3
    tensor = torch.tensor([math.nan])
    assert ranks.sum(tensor) is tensor
    assert (ranks.rank, ranks.size, ranks.local_size, ranks.leads) == (0, 1, 1, True)


@pytest.mark.parametrize("said", ["a mistake of ours", "shape '[2]' is invalid"])
def test_what_another_rank_has_nothing_to_do_with_stays_what_it_is(said):
    two = Ranks(Launch(rank=0, world_size=2), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=re.escape(said)) as error, hearing(two):
        raise RuntimeError(said)
    assert not isinstance(error.value, RankLost)
    for ranks in (None, Ranks.alone()):
        with pytest.raises(RuntimeError, match="gloo"), hearing(ranks):
            raise RuntimeError("gloo is mentioned, and there is nobody else")
