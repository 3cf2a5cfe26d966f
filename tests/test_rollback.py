"""Going back is part of the run: decided once, on the disk, and the same bits however it is met."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from training_runs import bits, checkpoint, entered, run

from fastbrain import TransformerLm, atomic, cli
from fastbrain.training import guard_log, metrics
from fastbrain.training.guard_log import GuardLog
from fastbrain.training.loop import Trainer

BACK = ("guard.policy=rollback", "eval.interval=99", "eval.samples=0")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("rollback")) as folder:
        yield folder


def poison(monkeypatch, attempts: set[int]) -> list[int]:
    """Make the gradients of these forward passes, counted from 0, not a number.

    Returns a list that gets the step, counted from 0, of every update that is launched.
    """
    accumulate, update = TransformerLm.accumulate_step, TransformerLm.step_clipped
    calls, updates = iter(range(10_000)), []

    def poisoned(model, batch, **options):
        losses = accumulate(model, batch, **options)
        if next(calls) in attempts:
            next(model.module.parameters()).grad[0, 0] = math.nan
        return losses

    def counted(model, *arguments):
        updates.append(len(updates))
        return update(model, *arguments)

    monkeypatch.setattr(TransformerLm, "accumulate_step", poisoned)
    monkeypatch.setattr(TransformerLm, "step_clipped", counted)
    return updates


def resumed_copy(name: str, first: int) -> str:
    """A copy of a finished run whose checkpoints after `first` are lost, and resumed."""
    again = f"{name}-again"
    shutil.copytree(name, again)
    for path in Path(again, "checkpoints").iterdir():
        if int(path.name[5:13]) > first:
            shutil.rmtree(path)
    assert cli.main(["resume", again]) == 0
    return again


def test_it_goes_back_to_the_kept_checkpoint_and_on_to_the_bits_of_a_resume(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        poison(patch, {10, 11, 12})
        options = ("train.max_steps=18", "save.interval_steps=1", "save.keep=1")
        assert run("kept", *BACK, *options) == 0
    said = capsys.readouterr().out
    assert "rolled back to step 1; the rows of steps 3 to 13 are passed over" in said
    assert guard_log.rollbacks(Path("kept/guard.jsonl")) == [(2, 11)]
    assert [row["start"] for row in metrics.read(Path("kept/metrics.jsonl")) if "loss" in row] == [
        *[1], *[2] * 17,
    ]  # fmt: skip
    # one that a rollback decided now could go back to, and one that will be it later
    steps = sorted(int(name[5:]) for name in os.listdir("kept/checkpoints"))
    assert steps[0] <= 18 - 8 < steps[1]
    assert steps[-2:] == [17, 18]
    assert len(steps) <= 4
    shutil.copytree("kept", "kept-lost")
    shutil.rmtree("kept-lost/checkpoints")
    Path("kept-lost/checkpoints").mkdir()
    assert cli.main(["resume", "kept-lost"]) == 0
    assert bits("kept-lost", 18) == bits("kept", 18)


def test_going_back_to_the_beginning_forgets_everything(monkeypatch):
    with monkeypatch.context() as patch:
        poison(patch, {4, 5, 6})
        assert run("fresh", *BACK, "train.max_steps=12", "save.interval_steps=12") == 0
    assert guard_log.rollbacks(Path("fresh/guard.jsonl")) == [(0, 7)]
    assert bits(resumed_copy("fresh", 0), 12) == bits("fresh", 12)


def test_a_decision_not_carried_out_yet_is_carried_out_by_the_resume():
    options = ("train.max_steps=8", "save.interval_steps=1", "save.keep=9")
    assert run("decided", *BACK, *options) == 0
    shutil.copytree("decided", "other")
    row = {"start": 1, "kind": "rollback", "step": 7, "first": 3, "last": 6}
    for name in ("decided", "other"):
        GuardLog(Path(name, "guard.jsonl"), print).decide(row)
    shutil.rmtree(checkpoint("other", 8))
    for step in range(4, 8):
        shutil.rmtree(checkpoint("other", step))
    for name in ("decided", "other"):
        assert cli.main(["resume", name]) == 0
    steps = [
        row["step"] for row in metrics.read(Path("decided/metrics.jsonl")) if row["start"] == 2
    ]
    assert steps[0] == 4
    assert bits("decided", 8) == bits("other", 8)
    assert not list(Path("decided/checkpoints").glob("*.superseded")), "gone after the next commits"


def test_a_log_that_was_lost_comes_back_from_the_checkpoint(capsys):
    assert run("log", *BACK, "train.max_steps=8", "save.interval_steps=2", "save.keep=9") == 0
    row = {"start": 1, "kind": "rollback", "step": 5, "first": 3, "last": 4}
    GuardLog(Path("log/guard.jsonl"), print).decide(row)
    assert cli.main(["resume", "log", "--step", "2"]) == 0
    shutil.copytree("log", "log-lost")
    for name in ("log", "log-lost"):
        shutil.rmtree(checkpoint(name, 8))
    Path("log-lost/guard.jsonl").unlink()
    capsys.readouterr()
    for name in ("log", "log-lost"):
        assert cli.main(["resume", name]) == 0
    assert capsys.readouterr().out.count("had lost the rollbacks that the checkpoint knows") == 1
    assert guard_log.rollbacks(Path("log-lost/guard.jsonl")) == [(3, 2)]
    assert bits("log", 8) == bits("log-lost", 8)
    # one that says something else is not believed
    Path("log/guard.jsonl").write_text(json.dumps(row | {"first": 1}) + "\n")
    assert cli.main(["resume", "log"]) == 2
    assert "disagree about the rollbacks of this run" in capsys.readouterr().err


def test_a_decision_is_forced_to_the_disk(tmp_path, monkeypatch):
    done: list[str] = []
    log = GuardLog(tmp_path / "guard.jsonl", print)
    fsync = atomic.fsync
    monkeypatch.setattr(
        atomic,
        "fsync",
        lambda fd: (done.append((tmp_path / "guard.jsonl").read_text()[-2:]), fsync(fd)),
    )
    monkeypatch.setattr(atomic, "sync_dir", lambda path: done.append(path.name))
    log.decide({"start": 1, "kind": "rollback", "step": 5, "first": 3, "last": 4})
    assert done == ["}\n", tmp_path.name]


def test_what_follows_from_a_step_follows_before_the_next_update(monkeypatch, capsys):
    updates = poison(monkeypatch, {2})
    assert run("stopped", "guard.policy=stop") == 1
    assert updates == [0, 1, 2]
    assert "step 3: its loss or gradient is not finite" in capsys.readouterr().err
    assert not list(Path("stopped/checkpoints").iterdir())


def test_the_last_step_before_a_stop_is_judged(monkeypatch):
    real = Trainer._train_step

    def asked(trainer: Trainer) -> None:
        real(trainer)
        if trainer.state.step == 2:
            Path("judged/STOP").touch()

    poison(monkeypatch, {1})
    monkeypatch.setattr(Trainer, "_train_step", asked)
    assert run("judged") == 75
    state = json.loads((checkpoint("judged", 2) / "trainer_state.json").read_bytes())
    assert (state["guard"]["consecutive_skips"], state["updates"]) == (1, 1)
    assert [row["step"] for row in guard_log.read(Path("judged/guard.jsonl"))] == [2]


def test_going_back_changes_nothing_before_everything_is_checked(capsys):
    assert run("asked", "save.interval_steps=1", "save.keep=9") == 0
    before = sorted(os.listdir("asked/checkpoints"))
    refused = (["train.learning_rate=1e-3"], ["--override", "train.seed=3"], ["train.sed=1"])
    for options in refused:
        assert cli.main(["resume", "asked", "--step", "2", *options]) == 2
    os.truncate(checkpoint("asked", 2) / "model.safetensors", 9)
    assert cli.main(["resume", "asked", "--step", "2"]) == 2
    said = capsys.readouterr().err
    assert "step-00000002 cannot be used: model.safetensors has 9 bytes" in said
    assert sorted(os.listdir("asked/checkpoints")) == before
    assert cli.main(["resume", "asked", "--step", "3"]) == 0


def test_checkpoints_without_a_configuration_are_not_built_upon(capsys):
    assert run("orphans") == 0
    Path("orphans/config.toml").unlink()
    assert run("orphans", "--resume", "auto") == 2
    assert "orphans has checkpoints, but no config.toml" in capsys.readouterr().err
    assert cli.main(["resume", "orphans"]) == 2
    assert "it has no config.toml, but checkpoints: put it back" in capsys.readouterr().err
    assert not Path("orphans/config.toml").exists()


def test_the_best_score_is_remembered_without_the_log(capsys):
    """Scores come back from metrics.jsonl, and from the checkpoint where that is gone."""
    assert run("best", "train.max_time=0.001s", "eval.interval=1") == 75
    assert cli.main(["resume", "best", "eval.interval=99", "save.interval_steps=1"]) == 75
    Path("best/metrics.jsonl").unlink()
    capsys.readouterr()
    assert cli.main(["resume", "best", "eval.interval=99", "--json"]) == 75
    assert json.loads(capsys.readouterr().out)["best_step"] == 1
