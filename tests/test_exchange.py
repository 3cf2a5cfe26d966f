"""What ranks tell each other in a step: every micro-batch keeps its place, any wish counts."""

import math

import pytest
import torch
from ranks import needs_fork, results

from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks
from fastbrain.training.exchange import Wishes, exchanged

CPU = torch.device("cpu")


def rank(index: int, size: int) -> Ranks:
    return Ranks(Launch(rank=index, world_size=size), CPU)


def summed(*wishes: Wishes) -> Wishes:
    """What a sum over so many ranks says."""
    tensors = [each.tensor(rank(index, len(wishes))) for index, each in enumerate(wishes)]
    return Wishes.of(torch.stack(tensors).sum(0).tolist())


@pytest.mark.parametrize("asking", range(3))
def test_one_rank_that_asks_is_enough(asking):
    quiet = [Wishes()] * 3
    assert summed(*quiet) == Wishes()
    stopping, saving = list(quiet), list(quiet)
    stopping[asking], saving[asking] = Wishes(stop=True), Wishes(save=True)
    assert summed(*stopping) == Wishes(stop=True)
    assert summed(*saving) == Wishes(save=True)
    assert summed(*[Wishes(stop=True, save=True)] * 3) == Wishes(stop=True, save=True)


def test_the_peak_is_that_of_the_rank_that_used_most():
    # 140 GiB and an odd MiB: more than FP32 could hold in bytes
    most = (140 * 1024 + 1) * 2**20
    assert summed(Wishes(peak_bytes=2**20), Wishes(peak_bytes=most)).peak_bytes == most
    # a part of a MiB counts as one
    assert summed(Wishes(peak_bytes=1), Wishes()).peak_bytes == 2**20


def test_wishes_are_kept_until_they_are_done_and_the_newest_peak_counts():
    asked = Wishes(stop=False, save=True, peak_bytes=5)
    assert asked.joined(Wishes(peak_bytes=7)) == Wishes(save=True, peak_bytes=7)
    assert asked.joined(Wishes(stop=True)) == Wishes(stop=True, save=True)


def test_alone_nothing_is_exchanged():
    losses = [torch.tensor(0.1), torch.tensor(math.nan)]
    auxiliaries = [torch.tensor(1.0), torch.tensor(2.0)]
    found = exchanged(rank(0, 1), losses, auxiliaries, Wishes(stop=True))
    assert torch.equal(found.losses, torch.stack(losses)) or found.losses[1].isnan()
    assert found.losses[0] == losses[0]
    assert found.auxiliaries.tolist() == [1.0, 2.0]
    assert found.wishes.numel() == 0


@needs_fork
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_micro_batch_of_every_rank_has_its_place_on_all_of_them(ranks):
    found = results("helper_jobs:exchange", ranks=ranks)
    first = found[0]
    assert all(each == first for each in found)
    # 0.1 is no FP32 value times anything: any arithmetic on the way would show
    losses = [torch.tensor(0.1 + micro).item() for micro in range(2 * ranks)]
    assert first["losses"][: 2 * ranks - 1] == losses[:-1]
    assert first["losses"][-1] == "nan"
    assert first["auxiliaries"] == [torch.tensor(0.01 * micro).item() for micro in range(2 * ranks)]
    assert first["wishes"] == [True, False, ranks * 2**20]
