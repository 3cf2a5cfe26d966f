"""Training runs follow the reference system step by step, from a seed and from its own files."""

import numpy as np
import pytest
from fixture_models import (
    CONTINUED_LOSS,
    LOSS,
    MODELS,
    SERIES_LOSS,
    SERIES_NORM,
    Reference,
    assert_loss,
    assert_norm,
)

from fastbrain import Schedule

SERIES = ("series_step_1", "series_step_2", "series_clip_1")


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return Reference(request.param)


def test_the_schedule_gives_the_rates(reference):
    for expected in (reference.expected[series] for series in SERIES):
        schedule = Schedule.warmup_cosine(*expected["schedule"])
        rates = np.array([schedule.rate(step) for step in range(expected["steps"])], np.float32)
        assert rates.tolist() == [row["lr"] for row in expected["rows"]]


@pytest.mark.parametrize("series", SERIES)
def test_twenty_steps_agree(reference, series):
    expected = reference.expected[series]
    accumulate, clip = expected["accumulate"], expected["mode"] == "clip"
    model = reference.build()
    for step, row in enumerate(expected["rows"]):
        model.optimizer.set_learning_rate(row["lr"])
        assert len(row["micro"]) == accumulate
        for micro, losses in enumerate(row["micro"]):
            batch = reference.corpus.batch(step * accumulate + micro, 8, 24)
            assert_loss(model.accumulate_step(batch), losses, SERIES_LOSS)
        assert_norm(model.grad_norm(), row["grad_norm"], SERIES_NORM)
        if clip:
            assert_norm(model.step_clipped(1.0, 1.0), row["returned"], SERIES_NORM)
        else:
            model.step(1 / accumulate)
    assert model.optimizer_step() == expected["steps"] == len(expected["rows"])


def test_the_trained_model_evaluates_as_it_did(reference):
    loss = reference.trained(moments=False).evaluate(reference.batch("plain"))
    assert_loss(loss, reference.expected["trained"]["evaluate_plain"], LOSS)


def test_supervised_steps_agree(reference):
    model = reference.trained(moments=True)
    batch = reference.batch("supervised")
    for losses in reference.expected["trained"]["supervised_train_steps"]:
        assert_loss(model.train_step_batch(batch), losses, CONTINUED_LOSS)


@pytest.mark.filterwarnings("ignore:.*moments are zero")  # without-state is about just that
@pytest.mark.parametrize("moments", [True, False], ids=["with-state", "without-state"])
def test_a_continued_run_agrees(reference, moments):
    name = "continue_with_state" if moments else "continue_without_state"
    model = reference.trained(moments=moments)
    for step, losses in enumerate(reference.expected["trained"][name]):
        batch = reference.corpus.batch(500 + step, 4, 24)
        assert_loss(model.train_step_batch(batch), losses, CONTINUED_LOSS)
