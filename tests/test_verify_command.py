"""`fastbrain verify` finds all damage, says where, and changes nothing."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from made_runs import command, commit, copied, made, relisted, state_of

from fastbrain.commands import verify
from fastbrain.training import manifest
from fastbrain.training.run_dir import RunDir


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "whole").path


@pytest.fixture
def run(whole, tmp_path) -> Path:
    path = copied(whole, tmp_path / "run")
    moved(path)
    return path


def moved(run: Path) -> None:
    """The tokens of a copied run are its own."""
    path = run / "data" / "corpus.json"
    record = json.loads(path.read_bytes())
    record["files"]["train"]["path"] = "../corpus.bin"
    path.write_text(json.dumps(record))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def test_an_intact_run(run, capsys):
    before = state_of(run)
    assert command(verify, run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [
        "step-00000006", "step-00000003", "data/../corpus.bin", "data/tokenizer.json",
        "metrics.jsonl", "guard.jsonl",
    ]  # fmt: skip
    assert all(" intact" in line for line in lines[:6])
    assert "GB verified in" in lines[6]
    assert lines[7:] == ["all intact"]
    assert state_of(run) == before


def test_the_document(run, capsys):
    flip(newest(run) / "model.safetensors")
    assert command(verify, run, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["intact"], found["exit_code"]) == ("run", False, 1)
    first, second = found["items"][:2]
    assert (first["step"], first["state"]) == (6, "damaged")
    assert first["words"] == "damaged: model.safetensors was changed after it was written"
    assert (second["step"], second["state"]) == (3, "intact")
    assert second["bytes_read"] == sum(
        each.stat().st_size for each in (run / "checkpoints" / "step-00000003").iterdir()
    )
    assert found["bytes_read"] >= second["bytes_read"]


DAMAGE = {
    "flipped": (
        lambda d: flip(d / "optimizer.safetensors"),
        "optimizer.safetensors was changed after it was written",
    ),
    "cut": (lambda d: os.truncate(d / "model.safetensors", 99), "model.safetensors has 99 bytes"),
    "missing": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "extra": (lambda d: (d / "x.bin").write_bytes(b"x"), "x.bin is not in MANIFEST.json"),
    "no manifest": (lambda d: (d / "MANIFEST.json").unlink(), "it has no MANIFEST.json"),
    "another step": (lambda d: relisted(d, step=7), "MANIFEST.json is of step 7"),
    "another run": (lambda d: relisted(d, run_id="f0"), "MANIFEST.json is of another run (f0)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_touched(run, kind, capsys):
    damage, reason = DAMAGE[kind]
    damage(newest(run))
    before = state_of(run)
    assert command(verify, run) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-00000006 ")
    assert f"damaged: {reason}" in lines[0]
    assert lines[1].startswith("step-00000003 ")
    assert lines[1].endswith("intact")
    assert lines[-1] == "1 damaged; the newest intact checkpoint is of step 3"
    assert state_of(run) == before
    assert command(verify, newest(run)) == 1
    assert reason in capsys.readouterr().out or kind == "no manifest"


def test_a_run_without_an_intact_checkpoint(run, capsys):
    for path in (run / "checkpoints").iterdir():
        flip(path / "model.safetensors")
    assert command(verify, run) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("there is no intact checkpoint")
    shutil.rmtree(run / "checkpoints")
    assert command(verify, run) == 3


def test_what_was_put_aside_is_listed_and_not_counted(run, capsys):
    newest(run).rename(run / "checkpoints" / "step-00000006.corrupt")
    commit(RunDir.open(run), 9).path.rename(run / "checkpoints" / "step-00000009.ab12.superseded")
    (run / "checkpoints" / ".tmp-step-12-1-ab").mkdir()
    assert command(verify, run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-00000003 ")
    assert lines[1].startswith("step-00000006.corrupt")
    assert lines[1].endswith("put aside: damaged earlier; not counted")
    assert lines[2].endswith("put aside: given up; not counted")
    assert not any(".tmp" in line for line in lines)


def test_a_checkpoint_stands_alone(run, tmp_path, capsys):
    alone = copied(newest(run), tmp_path / "backup")
    assert command(verify, alone) == 0
    assert command(verify, copied(alone, tmp_path / "step-00000006")) == 0
    capsys.readouterr()
    # a name that says a step must be right
    assert command(verify, copied(alone, tmp_path / "step-00000007")) == 1
    assert "damaged: MANIFEST.json is of step 6" in capsys.readouterr().out
    flip(alone / "model.safetensors")
    assert command(verify, alone) == 1


def test_a_checkpoint_inside_a_run_must_be_of_that_run(whole, tmp_path, monkeypatch, capsys):
    other = made(tmp_path / "other", ()).path
    shutil.copytree(newest(whole), other / "checkpoints" / "step-00000006")
    assert command(verify, other / "checkpoints" / "step-00000006") == 1
    assert "MANIFEST.json is of another run" in capsys.readouterr().out
    monkeypatch.chdir(newest(whole))
    assert command(verify, ".") == 0


def test_a_newer_format_is_refused_and_not_called_damage(run, capsys):
    relisted(newest(run), format_version=2)
    assert command(verify, run) == 2
    said = capsys.readouterr().out
    assert "is of format 2, newer than this fastbrain's 1" in said
    assert "damaged" not in said
    assert command(verify, newest(run)) == 2


def test_what_is_neither_is_refused(run, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none", run / "config.toml", run / "checkpoints"):
        assert command(verify, path) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("fastbrain: ")
        assert str(path) in said.err


def test_the_tokens_and_the_tokenizer_are_compared(run, capsys):
    data = run / "data"
    tokens = run / "corpus.bin"
    flip(tokens)
    tokenizer = json.loads((data / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"][0]["content"] = "<|end|>"
    (data / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert command(verify, run) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "damaged: its content is not that with which the run began" in lines[2]
    assert "damaged: its digest is " in lines[3]
    assert lines[-1] == "2 damaged; the newest intact checkpoint is of step 6"
    os.truncate(tokens, 400)
    assert command(verify, run) == 1
    assert "it has 400 bytes, and had 12000 when" in capsys.readouterr().out
    tokens.unlink()
    assert command(verify, run) == 1
    assert "No such file" in capsys.readouterr().out
    (data / "corpus.json").unlink()
    assert command(verify, run) == 1
    assert "data/corpus.json" in capsys.readouterr().out


def test_rows(run, capsys):
    metrics = run / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"start": 1, "st')  # what a kill leaves
    assert command(verify, run) == 0
    assert "intact, 7 rows" in capsys.readouterr().out
    metrics.write_bytes(b"\0\0\0\n" + metrics.read_bytes())
    assert command(verify, run) == 0
    assert "7 rows; line 1 cannot be read; readers pass over it" in capsys.readouterr().out
    metrics.write_bytes(b"\x80\x04nonsense\n" * 5)
    assert command(verify, run) == 1
    assert "no line of it is a row" in capsys.readouterr().out


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_fault(run, monkeypatch, capsys):
    fault = manifest.fault

    def late(directory, run_id, step):
        if step == 3:
            shutil.rmtree(directory)
        return fault(directory, run_id, step)

    monkeypatch.setattr(manifest, "fault", late)
    assert command(verify, run) == 0
    assert "deleted or renamed meanwhile, by the trainer" in capsys.readouterr().out


def test_a_checkpoint_that_is_written_anew_meanwhile_is_no_fault(run, monkeypatch, capsys):
    fault = manifest.fault

    def late(directory, run_id, step):
        if step == 3:
            directory.rename(run / "checkpoints" / "step-00000003.superseded")
            commit(RunDir.open(run), 3)
            return "model.safetensors is missing"
        return fault(directory, run_id, step)

    monkeypatch.setattr(manifest, "fault", late)
    assert command(verify, run) == 0
    assert "deleted or renamed meanwhile, by the trainer" in capsys.readouterr().out


def test_a_run_is_verified_while_it_trains(run, capsys):
    opened, stop = RunDir.open(run), threading.Event()

    def train() -> None:
        step = 6
        while not stop.is_set():
            step += 1
            commit(opened, step)
            opened.retain(keep=2, keep_every=0, best=None, warn=print)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        codes = {command(verify, run) for _ in range(40)}
    finally:
        stop.set()
        trainer.join()
    said = capsys.readouterr().out
    assert codes == {0}, said
