"""A checkpoint is there whole or not at all; damage is found, put aside and never deleted."""

import json
import os
from pathlib import Path

import pytest

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io
from fastbrain.training import manifest, run_dir
from fastbrain.training.run_dir import NoCheckpoint, RunDir


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run", {"train": {"seed": 1}})


def commit(run: RunDir, *steps: int, rollbacks: int = 0) -> None:
    for step in steps:

        def write(directory: Path, step: int = step) -> dict[str, atomic.Written]:
            state = {"step": step, "guard": {"data_skips": [[9, 9]] * rollbacks}}
            files = {
                "trainer_state.json": json.dumps(state).encode(),
                "model.safetensors": b"weights %d" % step,
                "optimizer.safetensors": bytes(5_000),
            }
            return {
                name: atomic.write_new(directory / name, [data]) for name, data in files.items()
            }

        run.commit(step, write)


def names(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.path / "checkpoints"))


def newest(run: RunDir) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = run.newest(said.append)
    return None if found is None else found.step, said


def test_a_run_is_opened_as_it_was_created(run):
    again = RunDir.open(run.path)
    assert again.run_id == run.run_id
    assert len(run.run_id) == 32
    assert again.tables["train"] == {"seed": 1}
    assert sorted(os.listdir(run.path)) == ["checkpoints", "config.toml", "samples"]


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"there is no run at .*nowhere: it has no"):
        RunDir.open(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("[train]\nseed = 1\n")
    with pytest.raises(InvalidConfig, match="is not the configuration of a run"):
        RunDir.open(tmp_path)


def test_a_commit_lists_every_file_with_size_and_digest(run):
    commit(run, 7)
    directory = run.path / "checkpoints" / "step-00000007"
    found = json.loads((directory / "MANIFEST.json").read_bytes())
    assert (found["format_version"], found["run_id"], found["step"]) == (1, run.run_id, 7)
    assert found["files"]["model.safetensors"] == {
        "bytes": 9,
        "sha256": atomic.sha256_of(directory / "model.safetensors"),
    }
    assert sorted(found["files"]) == sorted(manifest.REQUIRED)
    own = found.pop("self")
    canonical = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    (directory / "canonical").write_bytes(canonical)
    assert own == atomic.sha256_of(directory / "canonical")


def test_a_save_that_fails_leaves_no_trace(run, monkeypatch):
    commit(run, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write", fail)
        with pytest.raises(Io, match="No space left on device"):
            commit(run, 2)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "rename", fail)
        with pytest.raises(Io, match="No space left on device"):
            commit(run, 2)
    assert names(run) == ["step-00000001"]
    assert newest(run) == (1, [])


def test_everything_is_flushed_before_the_name_is_given(run, monkeypatch):
    done: list[str] = []
    sync_dir, rename = atomic.sync_dir, atomic.rename
    monkeypatch.setattr(
        atomic,
        "sync_dir",
        lambda path: (done.append(f"sync {Path(path).name[:9]}"), sync_dir(path)),
    )
    monkeypatch.setattr(
        atomic, "rename", lambda a, b: (done.append(f"rename {Path(b).name}"), rename(a, b))
    )
    commit(run, 3)
    assert done[-3:] == ["sync .tmp-step", "rename step-00000003", "sync checkpoin"]


def test_the_newest_is_found_by_step_whatever_the_clock_says(run):
    commit(run, 5, 100_000_000, 30)
    os.utime(run.path / "checkpoints" / "step-00000005", (2e9, 2e9))
    assert newest(run) == (100_000_000, [])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited(path: Path, **values: object) -> None:
    found = json.loads(path.read_bytes()) | values
    path.write_text(json.dumps(found))


def relisted(directory: Path, **values: object) -> None:
    """A manifest changed by someone who knows how."""
    path = directory / "MANIFEST.json"
    found = json.loads(path.read_bytes()) | values
    del found["self"]
    found["self"] = manifest._digest(found)
    path.write_text(json.dumps(found))


DAMAGE = {
    "a flipped bit": (
        lambda d: flip(d / "optimizer.safetensors"),
        "optimizer.safetensors was changed after it was written",
    ),
    "cut short": (
        lambda d: os.truncate(d / "optimizer.safetensors", 4_999),
        "optimizer.safetensors has 4999 bytes and should have 5000",
    ),
    "emptied": (
        lambda d: os.truncate(d / "model.safetensors", 0),
        "model.safetensors has 0 bytes",
    ),
    "a missing file": (
        lambda d: (d / "trainer_state.json").unlink(),
        "trainer_state.json is missing",
    ),
    "an extra file": (
        lambda d: (d / "model-2.safetensors").write_bytes(b"x"),
        "model-2.safetensors is not in MANIFEST.json",
    ),
    "no manifest": (lambda d: (d / "MANIFEST.json").unlink(), "it has no MANIFEST.json"),
    "half a manifest": (
        lambda d: os.truncate(d / "MANIFEST.json", 50),
        "MANIFEST.json cannot be read",
    ),
    "an edited manifest": (
        lambda d: edited(d / "MANIFEST.json", step=1),
        "MANIFEST.json was changed after it was written",
    ),
    "another step": (lambda d: relisted(d, step=9), "MANIFEST.json is of step 9"),
    "nothing listed": (
        lambda d: relisted(d, files={}),
        "MANIFEST.json does not list model.safetensors",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_put_aside_and_the_older_one_used(run, kind):
    damage, reason = DAMAGE[kind]
    commit(run, 10, 20)
    directory = run.path / "checkpoints" / "step-00000020"
    damage(directory)
    step, said = newest(run)
    assert step == 10
    assert len(said) == 1
    assert said[0].startswith(f"refused {directory}: {reason}")
    assert names(run) == ["step-00000010", "step-00000020.corrupt"]
    # its name is free for the step when it comes again
    commit(run, 20)
    assert newest(run) == (20, [])


def test_a_checkpoint_of_another_run_is_neither_used_nor_touched(run):
    commit(run, 10, 20)
    directory = run.path / "checkpoints" / "step-00000020"
    relisted(directory, run_id="f00")
    before = sorted((path.name, path.read_bytes()) for path in directory.iterdir())
    step, said = newest(run)
    assert step == 10
    assert said[0] == f"refused {directory}: MANIFEST.json is of another run (f00)"
    assert said[1] == f"{directory} has a name that this run may need: move it elsewhere"
    with pytest.raises(Io, match="step-00000020: it is there already; move it elsewhere"):
        commit(run, 20)
    for later in range(21, 26):
        commit(run, later)
        run.retain(1, 0, None, print)
    assert sorted((path.name, path.read_bytes()) for path in directory.iterdir()) == before


def test_putting_aside_survives_a_power_loss(run, monkeypatch):
    commit(run, 1, 2)
    flip(run.path / "checkpoints" / "step-00000002" / "model.safetensors")
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "sync_dir", synced.append)
    assert newest(run)[0] == 1
    assert synced == [run.path / "checkpoints"]


def test_a_note_beside_the_files_is_no_damage(run):
    commit(run, 10)
    (run.path / "checkpoints" / "step-00000010" / "note.txt").write_text("good one")
    assert newest(run) == (10, [])


def test_no_intact_checkpoint_is_told_from_none_at_all(run):
    assert newest(run) == (None, [])
    commit(run, 1, 2)
    for step in (1, 2):
        flip(run.path / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    for _ in range(2):  # the second time they have been put aside
        with pytest.raises(NoCheckpoint, match=r"has no intact checkpoint; the damaged ones are"):
            newest(run)
    assert names(run) == ["step-00000001.corrupt", "step-00000002.corrupt"]


def test_a_newer_format_is_not_damage(run):
    commit(run, 1)
    relisted(run.path / "checkpoints" / "step-00000001", format_version=2)
    with pytest.raises(InvalidSnapshot, match="is of format 2, newer than this fastbrain's 1"):
        newest(run)
    assert names(run) == ["step-00000001"]


def test_the_newest_the_best_the_multiples_and_the_last_few_stay(run):
    for step in range(1, 11):
        commit(run, step)
        run.retain(2, 4, 3 if step >= 3 else None, print)
        kept = [each.step for each in run.checkpoints()]
        assert len(kept) >= min(step, 2)
        free = [each for each in kept if each % 4 and each != 3]
        assert len(free) <= 3
    assert kept == [3, 4, 7, 8, 9, 10]
    assert all(name.startswith("step-") for name in names(run))


def test_going_back_puts_later_ones_aside_until_they_come_again(run):
    commit(run, 1, 2, 3)
    with pytest.raises(InvalidConfig, match="has no checkpoint of step 9; it has 1, 2, 3"):
        run.intact(9)
    assert run.intact(1).step == 1
    run.go_back(1)
    assert newest(run) == (1, [])
    assert names(run) == ["step-00000001", "step-00000002.superseded", "step-00000003.superseded"]
    commit(run, 2)
    run.retain(3, 0, None, print)
    assert names(run) == ["step-00000001", "step-00000002", "step-00000003.superseded"]


def test_what_a_killed_writer_left_is_swept(run):
    commit(run, 1)
    (run.path / "checkpoints" / ".tmp-step-2-123-abcd").mkdir()
    (run.path / "checkpoints" / ".tmp-step-2-123-abcd" / "model.safetensors").write_bytes(b"x")
    assert newest(run) == (1, [])
    run_dir.sweep(run.path)
    assert names(run) == ["step-00000001"]


def test_a_run_without_its_folder_of_checkpoints_has_none(tmp_path):
    run = RunDir(tmp_path, "0" * 32, {})
    with pytest.raises(NoCheckpoint, match="no folder of checkpoints"):
        run.newest(print)


def test_what_was_left_before_there_was_a_run_is_swept_as_well(tmp_path):
    path = tmp_path / "run"
    (path / "data").mkdir(parents=True)
    for name in (".tmp-config.toml-1-ab", "data/.tmp-corpus.json-1-ab", "data/train.bin"):
        (path / name).write_bytes(b"x")
    run_dir.sweep(path)
    assert [each.name for each in path.rglob("*")] == ["data", "train.bin"]


def test_a_rollback_gives_up_what_was_written_before_it_was_decided(run):
    commit(run, 1, 2, 3)
    run.carry_out([(1, 4)])
    assert [each.step for each in run.checkpoints()] == [1]
    commit(run, 2, 3, rollbacks=1)
    # again, as every later start does
    run.carry_out([(1, 4)])
    assert [each.step for each in run.checkpoints()] == [1, 2, 3]
    # the same steps once more: what came of the first rollback is given up as well
    run.carry_out([(1, 4), (1, 4)])
    assert [each.step for each in run.checkpoints()] == [1]
    assert newest(run) == (1, [])
