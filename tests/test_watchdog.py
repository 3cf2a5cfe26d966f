"""A run that hangs writes down where; one that only takes its time does not."""

import time
from functools import partial
from pathlib import Path

import pytest
from training_runs import entered, run

from fastbrain.lm import TransformerLm
from fastbrain.training import evaluation, loop
from fastbrain.training.watchdog import WARM, Watchdog

LEAST_S = 0.25


@pytest.fixture
def home(tmp_path):
    with entered(tmp_path) as folder:
        yield folder


def hang_here() -> None:
    time.sleep(3 * LEAST_S)


def beaten(watchdog: Watchdog, times: int = WARM + 4) -> None:
    for _ in range(times):
        watchdog.beat()
        time.sleep(0.001)


def test_a_hang_is_told_once_with_the_line_it_hangs_in(tmp_path):
    said: list[str] = []
    with Watchdog(tmp_path / "stacks.txt", said.append, LEAST_S) as watchdog:
        beaten(watchdog)
        hang_here()
        stacks = (tmp_path / "stacks.txt").read_text()
        assert "in hang_here" in stacks
        assert "no step for" in stacks
        time.sleep(LEAST_S)
        assert len(said) == 1
        assert "no step has ended for" in said[0]
        assert str(tmp_path / "stacks.txt") in said[0]
        beaten(watchdog)
        hang_here()
    assert len(said) == 2, "the next hang is another one"
    assert (tmp_path / "stacks.txt").read_text().count("no step for") == 2


def test_warming_up_and_pausing_and_slow_steps_are_no_hang(tmp_path):
    said: list[str] = []
    with Watchdog(tmp_path / "stacks.txt", said.append, LEAST_S) as watchdog:
        beaten(watchdog, 2)
        hang_here()  # the first steps compile
        beaten(watchdog)
        with watchdog.pause():  # an evaluation
            hang_here()
        beaten(watchdog, 2)
    assert not said
    assert not (tmp_path / "stacks.txt").exists()


def test_stacks_that_cannot_be_written_are_no_reason_to_end(tmp_path):
    said: list[str] = []
    with Watchdog(tmp_path / "missing" / "stacks.txt", said.append, LEAST_S) as watchdog:
        beaten(watchdog)
        hang_here()
    assert "cannot be written" in said[0]


def test_a_training_step_that_hangs_is_told_and_a_long_evaluation_is_not(home, monkeypatch, capsys):
    monkeypatch.setattr(loop, "Watchdog", partial(Watchdog, least_s=LEAST_S))
    lengths = ["train.max_steps=14", "save.interval_steps=14", "eval.interval=13"]
    score = evaluation.score

    def slow_score(*arguments):
        hang_here()
        return score(*arguments)

    monkeypatch.setattr(evaluation, "score", slow_score)
    assert run("patient", *lengths) == 0
    assert not Path("patient/stacks.txt").exists()
    accumulate, calls = TransformerLm.accumulate_step, iter(range(100))

    def hanging(model, batch, **options):
        if next(calls) == 11:
            hang_here()
        return accumulate(model, batch, **options)

    monkeypatch.setattr(TransformerLm, "accumulate_step", hanging)
    assert run("hanging", *lengths) == 0
    assert "in hang_here" in Path("hanging/stacks.txt").read_text()
    assert "no step has ended for" in capsys.readouterr().out
