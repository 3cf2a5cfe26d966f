"""Saving while training goes on: the file is of its step, and no failure goes unheard."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from training_runs import bits, checkpoint, entered, run

from fastbrain import TransformerLm, atomic, cli
from fastbrain.errors import Io
from fastbrain.training import snapshot, space
from fastbrain.training.loop import Trainer
from fastbrain.training.run_dir import RunDir
from fastbrain.training.saving import Saver
from fastbrain.training.snapshot import Snapshot


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("saving")) as folder:
        assert run("whole") == 0
        yield folder


def saves(name: str) -> list[str]:
    return sorted(path.name for path in Path(name, "checkpoints").iterdir())


def test_what_trains_on_does_not_change_what_is_being_saved(monkeypatch):
    """The save of step 3 is held up until three more steps are done."""
    trained, write = threading.Event(), Snapshot.write
    step = Trainer._train_step

    def counted(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 5:
            trained.set()

    def slow(taken: Snapshot, directory: Path) -> dict[str, atomic.Written]:
        assert threading.current_thread() is not threading.main_thread() or taken.step == 6
        assert trained.wait(30)
        return write(taken, directory)

    monkeypatch.setattr(Trainer, "_train_step", counted)
    monkeypatch.setattr(Snapshot, "write", slow)
    # no evaluation on the way, which would save a best one of its own
    assert run("slow", "eval.interval=6") == 0
    monkeypatch.undo()
    assert run("quick", "eval.interval=6") == 0
    assert bits("slow", 3) == bits("quick", 3)
    assert bits("slow", 6) == bits("quick", 6)


def test_a_save_that_is_due_waits_for_the_one_in_flight(monkeypatch):
    order: list[str] = []
    write = Snapshot.write

    def noted(taken: Snapshot, directory: Path) -> dict[str, atomic.Written]:
        order.append(f"begin {taken.step}")
        time.sleep(0.02)
        found = write(taken, directory)
        order.append(f"end {taken.step}")
        return found

    monkeypatch.setattr(Snapshot, "write", noted)
    assert run("every", "save.interval_steps=1", "save.keep=9") == 0
    assert order == [f"{what} {step}" for step in range(1, 7) for what in ("begin", "end")]
    assert len(saves("every")) == 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_refuses_is_said_loudly_and_training_goes_on(monkeypatch, capsys, number):
    """Saves of steps 1, 2, 4 and 5 fail, those of 3 and 6 do not: never three in a row."""
    name, real = f"refused-{number}", atomic.open

    def refuse(path: atomic.StrPath) -> int:
        if any(f".tmp-step-{step}-" in str(path) for step in (1, 2, 4, 5)):
            raise OSError(number, os.strerror(number))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "open", refuse)
        assert run(name, "save.interval_steps=1") == 0
    said = capsys.readouterr().out
    assert said.count("A CHECKPOINT COULD NOT BE SAVED: cannot write") == 4
    assert os.strerror(number) in said
    assert saves(name)[-1] == "step-00000006"
    assert bits(name, 6) == bits("whole", 6)


def test_three_refusals_in_a_row_end_the_run_and_nothing_is_lost(monkeypatch, capsys):
    real = atomic.open

    def refuse(path: atomic.StrPath) -> int:
        step = str(path).partition(".tmp-step-")[2].partition("-")[0]
        if step and int(step) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "open", refuse)
        assert run("full", "save.interval_steps=1", "train.max_steps=20", "eval.interval=99") == 1
    said = capsys.readouterr().err
    assert "3 saves in a row have failed; the last one: cannot write" in said
    assert "No space left on device; free some space" in said
    assert "the last checkpoint is full/checkpoints/step-00000002" in said
    assert saves("full") == ["step-00000001", "step-00000002"]


def test_a_last_save_that_fails_is_a_failure(monkeypatch, capsys):
    real = atomic.open

    def refuse(path: atomic.StrPath) -> int:
        if ".tmp-step-6-" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "open", refuse)
        assert run("last") == 1
    assert "Input/output error" in capsys.readouterr().err
    assert saves("last") == ["step-00000003"]
    assert cli.main(["resume", "last"]) == 0
    assert bits("last", 6) == bits("whole", 6)


def test_a_disk_without_room_is_found_before_anything_is_written(monkeypatch, capsys):
    usage = space.shutil.disk_usage

    def nearly_full(path: Path):
        return usage(path)._replace(free=50_000)

    monkeypatch.setattr(space.shutil, "disk_usage", nearly_full)
    assert run("preflight") == 2
    said = capsys.readouterr().err
    assert "two checkpoints need 0.42 MB, and the disk of" in said
    assert "has 0.05 MB free: free some space, or put the run on another disk" in said
    opened: list[str] = []
    monkeypatch.setattr(atomic, "open", lambda path: opened.append(str(path)))
    taken = Snapshot(1, {"model.safetensors": {"x": torch.zeros(20_000)}}, {})
    with pytest.raises(Io, match=r"a checkpoint needs 0.08 MB") as caught:
        taken.write(Path("whole"))
    assert caught.value.errno == errno.ENOSPC
    assert opened == []


def test_a_model_that_is_not_finite_is_not_saved(monkeypatch, capsys):
    step = Trainer._train_step

    def spoiled(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 5:
            # far into the tensor, past what the update of a step could reveal
            trainer.model.module.embedding.weight.data[-1, -1] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", spoiled)
        patch.setattr(TransformerLm, "evaluate_file", lambda *_: pytest.fail("too late"))
        assert run("spoiled", "eval.interval=99", "save.interval_steps=5") == 1
    said = capsys.readouterr().err
    assert "model.embed_tokens.weight holds values that are not finite numbers" in said
    assert saves("spoiled") == []


def test_values_are_looked_at_to_the_last_one(monkeypatch):
    monkeypatch.setattr(snapshot, "_BLOCK", 7)
    for place in (0, 6, 7, 20):
        values = torch.zeros(3, 7)
        values.view(-1)[place] = float("nan")
        with pytest.raises(snapshot.NotFinite, match=r"^x holds"):
            snapshot._require_finite("x", values)
    snapshot._require_finite("x", torch.zeros(3, 7))


def test_moments_are_looked_at_as_well(tmp_path):
    tensors = {"x.moment1": torch.zeros(9), "x.moment2": torch.full((9,), float("inf"))}
    taken = Snapshot(1, {"optimizer.safetensors": tensors}, {})
    with pytest.raises(snapshot.NotFinite, match=r"^x.moment2 holds"):
        taken.write(tmp_path)


def test_files_that_vanish_from_a_run_do_not_end_it(monkeypatch):
    step = Trainer._train_step

    def robbed(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 2:
            shutil.rmtree("robbed/data")
            Path("robbed/config.toml").unlink()
            Path("robbed/metrics.jsonl").unlink()

    monkeypatch.setattr(Trainer, "_train_step", robbed)
    assert run("robbed") == 0
    assert bits("robbed", 6) == bits("whole", 6)


def test_a_lock_that_was_removed_ends_the_run_before_it_writes_again(monkeypatch, capsys):
    step = Trainer._train_step

    def unlocked(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 4:
            Path("unlocked/run.lock").unlink()

    monkeypatch.setattr(Trainer, "_train_step", unlocked)
    assert run("unlocked") == 1
    assert "run.lock was removed or replaced" in capsys.readouterr().err
    assert saves("unlocked") == ["step-00000003"]


def test_an_error_that_is_no_disk_s_is_raised_at_the_next_step():
    saver = Saver(print)

    def fail() -> None:
        raise RuntimeError("a mistake of ours")

    saver.start(fail)
    saver._thread.join()
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        saver.check()
    saver.check()  # once


def test_deleting_that_fails_does_not_count_as_a_save_that_failed(monkeypatch, capsys):
    def refuse(run: RunDir, path: Path) -> None:
        raise Io(f"cannot delete {path}: Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "_delete", refuse)
        assert run("stuck", "save.interval_steps=1", "save.keep=1") == 0
    assert "Read-only file system; old checkpoints stay" in capsys.readouterr().out
    assert checkpoint("stuck", 6).is_dir()
