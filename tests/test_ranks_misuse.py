"""What several ranks would get wrong without a word is refused, or cannot go wrong."""

import pytest
from ranks import needs_fork, results, together

pytestmark = needs_fork

NO_RANKS, TWICE, TRAIN_STEP, SUMMED, STEP, CLIPPED = range(6)


def test_slips_of_a_loop_are_refused_on_every_rank_and_leave_it_usable():
    for found in results("misuse_jobs:slips"):
        assert found[NO_RANKS] == "ranks must be what Ranks.join() returns, got 'ddp'"
        assert found[TWICE].startswith("this process has joined the other ranks before")
        assert found[TRAIN_STEP].startswith("train_step_batch: this model is distributed over 2")
        assert (
            "already; all micro-batches of a step but its last belong under no_sync()"
            in (found[SUMMED])
        )
        for each in (found[STEP], found[CLIPPED]):
            assert each.startswith("step: the gradients have not been summed over the ranks")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_that_differ_become_those_of_the_first_rank(parallel):
    (first, after), (second, _) = results("misuse_jobs:unlike", parallel)
    assert first != second
    assert after == first


def test_verbs_of_one_process_are_refused_and_one_rank_says_so():
    first, second = together("misuse_jobs:verb", ["verify", "runs/first"])
    assert (first.code, second.code) == (2, 2)
    assert first.err.startswith("fastbrain: this verb runs in one process: start it without torch")
    assert second.err == second.out == ""
