"""Which steps are bad and what follows, as functions of numbers."""

import json
import math

import pytest

from fastbrain.training import guard_log
from fastbrain.training.guard import ENOUGH, WINDOW, Guard, Kind, Rollback
from fastbrain.training.guard_log import GuardLog

NAN = math.nan


def warm(policy: str = "skip", steps: int = ENOUGH) -> Guard:
    """A guard that has seen losses of 2.0 to 2.2 and norms of 1.0 to 1.1."""
    guard = Guard(policy)
    for step in range(steps):
        assert guard.judge(step, 2 + step % 3 / 10, 1 + step % 2 / 10).kind is Kind.GOOD
    return guard


@pytest.mark.parametrize(
    ("loss", "norm"), [(NAN, 1.0), (2.0, NAN), (math.inf, 1.0), (2.0, math.inf)]
)
def test_what_is_not_finite_is_a_skip_and_never_enters_the_window(loss, norm):
    guard = warm()
    before = list(guard.losses), list(guard.norms)
    assert guard.judge(ENOUGH, loss, norm).kind is Kind.SKIP
    assert (list(guard.losses), list(guard.norms)) == before
    # so the next step is judged as if it had not been
    assert guard.judge(ENOUGH + 1, 2.1, 1.0).kind is Kind.GOOD
    assert guard.skips == 0


def test_a_spike_is_far_above_the_median_by_the_deviation_of_the_window():
    # losses 2.0, 2.1, 2.2: median 2.1, deviation 0.1; norms 1.0, 1.1: median 1.05, 0.05
    limit = 2.1 + 8 * 1.4826 * 0.1
    verdict = warm().judge(ENOUGH, limit - 1e-6, 1.0)
    assert verdict.kind is Kind.GOOD
    assert verdict.loss_limit == pytest.approx(limit)
    assert verdict.norm_limit == pytest.approx(1.05 + 8 * 1.4826 * 0.05)
    assert warm().judge(ENOUGH, limit + 1e-6, 1.0).kind is Kind.SPIKE
    assert warm().judge(ENOUGH, 2.1, 1.7).kind is Kind.SPIKE


def test_a_window_without_spread_allows_a_tenth():
    guard = Guard()
    for step in range(ENOUGH):
        guard.judge(step, 2.0, 1.0)
    assert guard.judge(ENOUGH, 2.19, 1.09).kind is Kind.GOOD
    assert guard.judge(ENOUGH + 1, 2.21, 1.0).kind is Kind.SPIKE


def test_the_first_steps_cannot_spike():
    guard = warm(steps=ENOUGH - 1)
    verdict = guard.judge(ENOUGH - 1, 1e6, 1e6)
    assert (verdict.kind, verdict.loss_limit) == (Kind.GOOD, None)


def test_the_window_forgets():
    guard = warm()
    for step in range(ENOUGH, ENOUGH + WINDOW):
        guard.judge(step, 5.0, 1.0)
    assert len(guard.losses) == WINDOW
    # a level that stays is not a spike for ever
    assert guard.judge(999, 5.0, 1.0).kind is Kind.GOOD


def test_nothing_but_skips_stops():
    guard = warm()
    stops = [guard.judge(ENOUGH + i, NAN, 1.0).stop for i in range(20)]
    assert stops[:19] == [None] * 19
    assert "was not finite in the last 20 steps" in stops[19]


def test_stop_stops_at_the_first():
    assert "is not finite, and guard.policy is" in warm("stop").judge(ENOUGH, NAN, 1.0).stop


def test_rollback_goes_to_eight_before_the_first_bad_step():
    guard = warm("rollback")
    assert [guard.judge(40 + i, NAN, 1.0).rollback for i in range(3)] == [
        None, None, Rollback(32, 42),
    ]  # fmt: skip
    assert Rollback(32, 42).passed_over == (32, 11)
    spiking = warm("rollback", WINDOW)
    found = [spiking.judge(140 + i, 99.0, 1.0) for i in range(50)]
    assert [each.rollback for each in found[:49]] == [None] * 49
    assert found[49].rollback == Rollback(132, 189)
    # a good step between begins the count anew
    broken = warm("rollback")
    for step in (40, 41, 43, 44):
        assert broken.judge(step, NAN, 1.0).rollback is None
        if step == 41:
            broken.judge(42, 2.1, 1.0)
    assert Guard("rollback").judge(0, NAN, 1.0).rollback is None
    early = Guard("rollback")
    assert [early.judge(i, NAN, 1.0).rollback for i in range(3)][2] == Rollback(0, 2)


def test_a_fourth_rollback_is_a_stop():
    guard = warm("rollback")
    guard.data_skips = [(1, 2), (3, 4), (5, 6)]
    for step in (40, 41):
        guard.judge(step, NAN, 1.0)
    verdict = guard.judge(42, NAN, 1.0)
    assert verdict.rollback is None
    assert "it went wrong again after 3 rollbacks" in verdict.stop


def test_rows_are_passed_over_from_the_first_step_given_up():
    guard = Guard(data_skips=[(32, 11), (50, 3)])
    assert [guard.data_step(step) for step in (31, 32, 49, 50, 60)] == [31, 43, 60, 64, 74]


def test_the_way_back_is_as_far_as_a_rollback_can_reach():
    guard = warm("rollback", steps=40)
    assert guard.way_back(40) == 32
    for step in (40, 41):
        guard.judge(step, NAN, 1.0)
    assert guard.way_back(42) == 32
    assert guard.judge(42, NAN, 1.0).rollback.first == 32
    assert Guard().way_back(3) == 0


def test_a_guard_goes_through_a_checkpoint_to_the_bit():
    guard = warm("rollback")
    guard.judge(40, 2.1000000000000001, 1 / 3)
    guard.judge(41, NAN, 1.0)
    document = json.loads(json.dumps(guard.document(), allow_nan=False))
    again = Guard.restored("rollback", document, [])
    assert again == guard
    for step in (42, 43, 44):
        assert again.judge(step, NAN, 2.0) == guard.judge(step, NAN, 2.0)


def test_the_log_has_what_a_resume_wrote_again_once(tmp_path):
    log = GuardLog(tmp_path / "guard.jsonl", print)
    log.note({"start": 1, "kind": "skip", "step": 5, "data_step": 4, "loss": math.nan})
    log.note({"start": 1, "kind": "spike", "step": 9, "data_step": 8, "loss": 3.0})
    again = GuardLog(tmp_path / "guard.jsonl", print)
    again.note({"start": 2, "kind": "spike", "step": 9, "data_step": 8, "loss": 3.0})
    again.decide({"start": 2, "kind": "rollback", "step": 12, "first": 1, "last": 11})
    # after it the same step reads other rows, and may spike as well; so may all of them
    again.note({"start": 3, "kind": "spike", "step": 9, "data_step": 19, "loss": 4.0})
    again.decide({"start": 3, "kind": "rollback", "step": 12, "first": 1, "last": 11})
    rows = guard_log.read(tmp_path / "guard.jsonl")
    assert [(row["kind"], row["step"], row["start"]) for row in rows] == [
        ("skip", 5, 1), ("spike", 9, 2), ("spike", 9, 3), ("rollback", 12, 2), ("rollback", 12, 3),
    ]  # fmt: skip
    assert rows[0]["loss"] is None
    assert guard_log.rollbacks(tmp_path / "guard.jsonl") == [(1, 11), (1, 11)]
    # an edited file ends no run and no report
    with (tmp_path / "guard.jsonl").open("a") as file:
        for row in ({"first": []}, {"step": "9"}, {"data_step": {}}, {"kind": []}, {"start": None}):
            line = {"start": 4, "kind": "rollback", "step": 1, "first": 1, "last": 2} | row
            file.write(json.dumps(line) + "\n")
    assert guard_log.read(tmp_path / "guard.jsonl") == rows
    assert guard_log.rollbacks(tmp_path / "guard.jsonl") == [(1, 11), (1, 11)]
    assert guard_log.read(tmp_path / "none") == []
    assert guard_log.rollbacks(tmp_path / "none") == []


def test_a_decision_survives_a_row_that_was_torn_before_it(tmp_path, monkeypatch):
    said: list[str] = []
    log = GuardLog(tmp_path / "guard.jsonl", said.append)
    real = type(tmp_path).open

    class Full:
        """A file on a disk that fills up in the middle of a row."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:9])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda path, mode: Full(real(path, mode)))
        log.note({"start": 1, "kind": "skip", "step": 5})
        log.note({"start": 1, "kind": "skip", "step": 6})
    assert len(said) == 1
    log.decide({"start": 1, "kind": "rollback", "step": 12, "first": 1, "last": 11})
    log.note({"start": 1, "kind": "skip", "step": 13})
    assert guard_log.rollbacks(tmp_path / "guard.jsonl") == [(1, 11)]
    assert [row["step"] for row in guard_log.read(tmp_path / "guard.jsonl")] == [12, 13]
