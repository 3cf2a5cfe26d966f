"""Processes find each other in a store that those before them, and other starts, have used."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fastbrain.parallel.meeting import NotMet, meeting

SOON = timedelta(seconds=10)


def met(store: dist.HashStore, size: int) -> list[str]:
    with ThreadPoolExecutor(size) as ranks:
        found = [ranks.submit(meeting, store, rank, size, SOON) for rank in range(size)]
        return [each.result() for each in found]


def test_all_have_one_name_that_nobody_had_before():
    store = dist.HashStore()
    starts = [met(store, 3) for _ in range(5)]
    assert [len(set(each)) for each in starts] == [1] * 5
    assert len({each[0] for each in starts}) == 5


def test_what_the_dead_have_left_is_no_meeting():
    store = dist.HashStore()
    met(store, 2)
    # as the first rank finds it, whose peer is still to come, and the other way round
    for rank in (0, 1):
        with pytest.raises(NotMet, match="rank " + str(1 - rank)):
            meeting(store, rank, 2, timedelta(seconds=0.2))


def test_one_that_has_seen_an_older_start_joins_the_new_one():
    store = dist.HashStore()
    # it proposed, and died before anybody came
    with pytest.raises(NotMet, match="rank 1, 2 did not come within"):
        meeting(store, 0, 3, timedelta(seconds=0.1))
    assert len(set(met(store, 3))) == 1
