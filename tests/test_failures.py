"""What a run that fails says: what would help, what is left, and how to go on."""

import shutil

import pytest
import torch
from training_runs import checkpoint, entered, run

from fastbrain import cli
from fastbrain.training import conclusion
from fastbrain.training.loop import Trainer
from fastbrain.training.progress import Slowdown


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("failures")) as folder:
        yield folder


def failing_at(monkeypatch, step: int, error: Exception) -> None:
    from fastbrain.devices import naming_remedies

    real = Trainer._train_step

    def failed(trainer: Trainer) -> None:
        if trainer.state.step == step:
            with naming_remedies():
                raise error
        real(trainer)

    monkeypatch.setattr(Trainer, "_train_step", failed)


def test_a_first_step_that_does_not_fit_names_the_ways_out(monkeypatch, capsys):
    failing_at(monkeypatch, 0, torch.OutOfMemoryError("CUDA out of memory"))
    assert run("large") == 1
    said = capsys.readouterr().err
    assert "the device ran out of memory" in said
    assert "To make a step smaller, cheapest first:\nfastbrain:   1. " in said
    ways = [line for line in said.splitlines() if "saves" in line]
    assert len(ways) == said.count("fastbrain:   ") == 6
    assert "no checkpoint was written yet; begin again: fastbrain resume large" in said
    assert "Traceback" not in said


def test_a_card_that_cannot_be_planned_for_is_no_second_failure(monkeypatch):
    from fastbrain.errors import InvalidConfig
    from fastbrain.training import config_files

    def unknown(*_, **__):
        raise InvalidConfig("card 'x' is not known")

    monkeypatch.setattr(conclusion, "planned", unknown)
    settings = config_files.load("tiny.toml")
    settings = settings.with_model(settings.config(61))
    assert conclusion.remedies(settings) == []


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: unspecified launch")],
    ids=["memory", "driver"],
)
def test_a_later_failure_names_the_last_checkpoint(monkeypatch, capsys, error):
    name = f"later-{type(error).__name__}"
    with monkeypatch.context() as patch:
        failing_at(patch, 5, error)
        assert run(name) == 1
    said = capsys.readouterr().err
    assert str(error) in said
    assert f"the last checkpoint is {name}/checkpoints/step-00000003; go on from it" in said
    assert "saves about" not in said
    assert cli.main(["resume", name]) == 0
    assert checkpoint(name, 6).is_dir()


def test_a_failure_without_its_folder_is_no_second_one(monkeypatch, capsys):
    def removed(trainer: Trainer) -> None:
        shutil.rmtree("removed/checkpoints")
        raise RuntimeError("CUDA error: unspecified launch")

    monkeypatch.setattr(Trainer, "_train_step", removed)
    assert run("removed") == 1
    said = capsys.readouterr().err
    assert "CUDA error: unspecified launch" in said
    assert "cannot read removed/checkpoints: No such file or directory" in said


def spoken(speeds: list[float], every_s: float = 10.0) -> list[tuple[int, str]]:
    watch, said = Slowdown(), []
    for index, speed in enumerate(speeds):
        if sentence := watch.note(index * every_s, speed):
            said.append((index, sentence))
    return said


def test_a_speed_that_stays_low_is_said_once():
    usual, slow = [40_000.0, 41_000.0, 39_000.0] * 20, [31_000.0] * 90
    said = spoken([*usual, *slow])
    assert len(said) == 1
    # five minutes after it began, not at once
    assert 90 <= said[0][0] <= 96
    assert said[0][1].startswith(
        "for 5 minutes the speed has been at most 31.0k tok/s, and was 40.0k before: does "
    )


@pytest.mark.parametrize(
    "speeds",
    [
        [40_000.0] * 200,
        [40_000.0] * 60 + [33_000.0] * 60,  # less than a fifth
        [40_000.0] * 60 + [20_000.0] * 20 + [40_000.0] * 60,  # for three minutes
        [20_000.0] * 20 + [40_000.0] * 60,  # faster
        [40_000.0] * 20 + [20_000.0] * 30,  # too little before it to say what is usual
    ],
    ids=["steady", "a little", "for a while", "faster", "at once"],
)
def test_other_speeds_are_not_worth_a_word(speeds):
    assert spoken(speeds) == []
