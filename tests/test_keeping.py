"""Which checkpoints stay: never fewer than two intact ones, never another run's, whatever fails."""

import random
from pathlib import Path

import pytest
from test_run_dir import commit, flip, relisted

from fastbrain import atomic
from fastbrain.errors import Io
from fastbrain.training import manifest, run_dir
from fastbrain.training.keeping import kept
from fastbrain.training.run_dir import RunDir


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    """Nothing here is about power: flushing thousands of small files takes most of the time."""
    monkeypatch.setattr(atomic, "fsync", lambda fd: None)
    monkeypatch.setattr(atomic, "sync_dir", lambda path: None)


def test_what_stays_is_a_function_of_numbers():
    steps = set(range(1, 11))
    assert kept(steps, 10, None, 3, 0) == {7, 8, 9, 10}
    assert kept(steps, 10, 2, 1, 0) == {2, 9, 10}
    assert kept(steps, 10, 2, 2, 4) == {2, 4, 7, 8, 9, 10}
    # two at least, the newest
    assert kept(steps, 10, None, 0, 0) == {9, 10}
    assert kept({10}, 10, None, 3, 0) == {10}
    assert kept({3, 10}, 10, 10, 0, 0) == {3, 10}
    # a rollback that may still be decided needs one that is old enough
    assert kept(steps, 10, None, 1, 0, way_back=4) == {4, 5, 9, 10}
    # and one that will be
    assert kept(steps, 10, None, 1, 0, way_back=0) == {1, 9, 10}


def test_there_is_always_a_way_back():
    """Saving every step and keeping one, at every step something is old enough, or nothing was."""
    there: set[int] = set()
    for step in range(1, 60):
        there = kept(there | {step}, step, None, 1, 0, way_back=max(step - 8, 0))
        assert len(there) <= 4
        assert step < 9 or min(there) <= step - 8


def violations(seed: int, folder: Path) -> list[str]:
    """What goes wrong in a run of random commits, failures, damage and foreign checkpoints."""
    generator = random.Random(seed)
    run = RunDir.create(folder / str(seed), {})
    keep, every = generator.randint(1, 4), generator.choice([0, 0, 3, 5])
    best: int | None = None
    intact: set[int] = set()
    foreign: set[Path] = set()
    found: list[str] = []
    for step in range(1, generator.randint(6, 14)):
        happens = generator.random()
        if happens < 0.15:
            continue  # a save that failed: nothing is committed, so nothing may be deleted
        commit(run, step)
        intact.add(step)
        if happens < 0.3:
            best = step
        had = len(intact)
        if happens > 0.85 and had > 2:
            hit = generator.choice(sorted(intact - {step}))
            flip(run.path / "checkpoints" / f"step-{hit:08d}" / "optimizer.safetensors")
            intact.discard(hit)
        elif happens > 0.75 and len(intact) > 3:
            hit = generator.choice(sorted(intact - {step}))
            path = run.path / "checkpoints" / f"step-{hit:08d}"
            relisted(path, run_id="f00")
            intact.discard(hit)
            foreign.add(path)
        before = {each.step for each in run.checkpoints()}
        run.retain(keep, every, best, lambda _: None)
        left = {each.step for each in run.checkpoints()}
        there = {
            each.step
            for each in run.checkpoints()
            if manifest.fault(each.path, run.run_id, each.step) is None
        }
        if len(intact) >= 2 and len(there) < 2:
            found.append(f"{seed}: {len(there)} intact of {len(intact)}")
        if step not in there or (best in intact and best not in there):
            found.append(f"{seed}: newest or best is gone at {step}")
        protected = {
            each for each in there if each in (step, best) or (every and each % every == 0)
        }
        if len(there - protected) > max(keep, 2 - len(protected)):
            found.append(f"{seed}: too many: {there - protected}")
        if every and any(each % every == 0 for each in intact - there):
            found.append(f"{seed}: a multiple of {every} is gone")
        if any(not path.is_dir() for path in foreign):
            found.append(f"{seed}: a foreign one is gone")
        damaged = before - intact - {int(path.name[5:]) for path in foreign}
        aside = {int(path.name[5:13]) for path in (run.path / "checkpoints").glob("*.corrupt")}
        if not damaged <= aside:
            found.append(f"{seed}: damage deleted: {damaged - aside}")
        intact &= left
    return found


def test_random_sequences_break_no_rule(tmp_path):
    assert [each for seed in range(40) for each in violations(seed, tmp_path)] == []


@pytest.mark.slow
def test_a_thousand_random_sequences_break_no_rule(tmp_path):
    assert [each for seed in range(1_000) for each in violations(seed, tmp_path)] == []


def test_what_was_deleted_half_way_is_no_checkpoint(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run", {})
    commit(run, 1, 2, 3, 4)
    monkeypatch.setattr("fastbrain.training.run_dir.shutil.rmtree", lambda *_, **__: None)
    run.retain(1, 0, None, print)
    assert [each.step for each in run.checkpoints()] == [3, 4]
    assert len(list((run.path / "checkpoints").glob(".tmp-del-*"))) == 2
    monkeypatch.undo()
    run_dir.sweep(run.path)
    assert sorted(each.name for each in (run.path / "checkpoints").iterdir()) == [
        "step-00000003", "step-00000004",
    ]  # fmt: skip


def test_nothing_is_deleted_when_the_commit_failed(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run", {})
    commit(run, 1, 2)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastbrain.atomic.fsync", fail)
    with pytest.raises(Io, match="No space left"):
        commit(run, 3)
    assert [each.step for each in run.checkpoints()] == [1, 2]
