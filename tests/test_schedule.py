"""The learning rate is a pure function of the step."""

import math
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest

from fastbrain.errors import InvalidConfig
from fastbrain.schedule import Schedule


def test_the_rate_rises_linearly_from_the_first_step():
    schedule = Schedule.warmup_cosine(1.0, 4, 100)
    assert [schedule.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_peak_is_held_for_one_step_more_and_then_falls():
    schedule = Schedule.warmup_cosine(3e-3, 40, 400)
    assert schedule.rate(39) == schedule.rate(40) == 3e-3
    rates = [schedule.rate(step) for step in range(40, 401)]
    assert all(later < earlier for earlier, later in pairwise(rates))


def test_halfway_down_the_cosine_is_halfway_to_the_floor():
    schedule = Schedule.warmup_cosine(1.0, 10, 110).floor(0.5)
    assert schedule.rate(60) == pytest.approx(0.75)
    assert schedule.rate(35) == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2)


def test_rates_of_a_run_of_400_steps():
    schedule = Schedule.warmup_cosine(3e-3, 40, 400)
    printed = [f"{schedule.rate(step):.5f}" for step in range(50, 401, 50)]
    assert printed == [
        "0.00299", "0.00282", "0.00242", "0.00188", "0.00130", "0.00078", "0.00043", "0.00030",
    ]  # fmt: skip


@pytest.mark.parametrize("step", [100, 101, 10**12])
def test_the_floor_is_held_for_ever(step):
    schedule = Schedule.warmup_cosine(2.0, 10, 100)
    assert schedule.rate(step) == pytest.approx(0.2)
    assert schedule.floor(0.25).rate(step) == 0.5
    assert schedule.floor(0.0).rate(step) == 0.0
    assert schedule.floor(1.0).rate(step) == 2.0


def test_without_a_warm_up_the_first_rate_is_the_peak():
    assert Schedule.warmup_cosine(0.5, 0, 10).rate(0) == 0.5


@pytest.mark.parametrize("total", [0, 3, 4])
def test_a_warm_up_past_the_end_is_finished_then_the_floor_follows(total):
    schedule = Schedule.warmup_cosine(1.0, 4, total).floor(0.5)
    assert [schedule.rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.5]


def test_a_schedule_is_a_value():
    schedule = Schedule.warmup_cosine(1.0, 4, 10)
    assert schedule == Schedule.warmup_cosine(1.0, 4, 10).floor(0.1)
    lower = schedule.floor(0.05)
    assert lower != schedule
    assert schedule.rate(10) == 0.1
    with pytest.raises(FrozenInstanceError):
        schedule.peak = 2.0


REFUSED = {
    "peak-negative": (lambda: Schedule.warmup_cosine(-1e-3, 1, 2), "peak must be", "-0.001"),
    "peak-nan": (lambda: Schedule.warmup_cosine(math.nan, 1, 2), "peak must be", "nan"),
    "peak-infinite": (lambda: Schedule.warmup_cosine(math.inf, 1, 2), "peak must be", "inf"),
    "warm-up-negative": (lambda: Schedule.warmup_cosine(1.0, -1, 2), "warmup must be", "-1"),
    "total-negative": (lambda: Schedule.warmup_cosine(1.0, 1, -2), "total must be", "-2"),
    "floor-negative": (lambda: Schedule.warmup_cosine(1.0, 1, 2).floor(-0.1), "floor must", "-0.1"),
    "floor-over-1": (lambda: Schedule.warmup_cosine(1.0, 1, 2).floor(1.5), "floor must", "1.5"),
    "floor-nan": (lambda: Schedule.warmup_cosine(1.0, 1, 2).floor(math.nan), "floor must", "nan"),
    "step-negative": (lambda: Schedule.warmup_cosine(1.0, 1, 2).rate(-1), "step must be", "-1"),
}


@pytest.mark.parametrize(("call", "rule", "value"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_setting_is_refused_by_name_value_and_rule(call, rule, value):
    with pytest.raises(InvalidConfig, match=rule) as refused:
        call()
    assert str(refused.value).endswith(value)
