"""`fastbrain inspect` tells by its content what a file is, whether it is whole, what is in it."""

import json
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, golden_tensors, written
from made_runs import command, copied, made, relisted, state_of

from fastbrain.commands import inspect
from fastbrain.formats import opt
from fastbrain.formats.safetensors_file import write_tensors
from fastbrain.precision import Precision
from fastbrain.tokens import TokenFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "whole").path


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return copied(whole, tmp_path / "run")


@pytest.fixture
def ask(capsys):
    """Inspect a path; returns the exit code, the document, and the page of text."""

    def asked(path: Path, *options: str) -> tuple[int, dict, str]:
        code = command(inspect, path, *options)
        text = capsys.readouterr()
        assert command(inspect, path, "--json", *options) == code
        found = capsys.readouterr().out
        return code, json.loads(found) if found else {}, text.out + text.err

    return asked


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


def rows(text: str) -> dict[str, str]:
    """The page as label to value; labels and values are two aligned columns."""
    lines = text.split("\n\n")[0].splitlines()
    width = lines[0].index(lines[0].split()[1])
    assert all(line[width - 1] == " " and line[width] != " " for line in lines)
    return {line[:width].strip(): line[width:] for line in lines if line[0] != " "}


def moments(path: Path, step: int = 7) -> Path:
    opt.write(path, step, [(name, each / 2, each * each) for name, each in golden_tensors()])
    return path


@pytest.mark.parametrize("precision", list(Precision))
def test_weights_of_the_reference_format(tmp_path, ask, precision):
    code, found, text = ask(written(tmp_path / "odd name", precision=precision))
    total, active = GOLDEN.parameter_counts()
    assert code == 0
    page = rows(text)
    assert page["what"] == f"weights of the reference format (.rbw), {precision}"
    assert page["whole"].startswith("yes, by its header, every tensor's shape and its size")
    assert page["parameters"] == f"{total:,} total, {active:,} active"
    assert (found["step"], found["tensor_count"]) == (3, 27)
    assert found["parameters"] == {"total": total, "active": active}
    assert found["optimizer"]["kind"] == "Adam"
    assert "and 21 more; --tensors lists all of them" in text
    assert len(found["tensors"]) == 6


def test_all_tensors_are_listed_on_demand(tmp_path, ask):
    _, found, text = ask(written(tmp_path / "model.rbw"), "--tensors")
    assert len(found["tensors"]) == 27
    assert found["tensors"][1] == {
        "name": "model.layers.0.input_layernorm.weight",
        "shape": [1, 4],
        "dtype": "F32",
    }
    assert "model.norm.weight" in text
    assert "more;" not in text


def test_optimizer_state_of_the_reference_format(tmp_path, ask):
    code, found, text = ask(moments(tmp_path / "x"))
    assert code == 0
    assert rows(text)["what"] == "optimizer state of the reference format (.opt), F32"
    assert (found["step"], found["tensor_count"]) == (7, 27)
    assert found["parameters"] == {"with moments": GOLDEN.parameter_counts().total}


def test_bytes_past_the_end_are_noted(tmp_path, ask):
    for path in (written(tmp_path / "model.rbw"), moments(tmp_path / "model.opt")):
        with path.open("ab") as file:
            file.write(b"12345")
        code, found, _ = ask(path)
        assert code == 0
        assert any("5 bytes after the last tensor are ignored" in n for n in found["notes"])


@pytest.mark.parametrize("name", ["model.rbw", "model.opt", "model.safetensors"])
def test_a_file_cut_anywhere_is_not_whole(tmp_path, ask, name):
    path = tmp_path / name
    if name.endswith("rbw"):
        written(path)
    elif name.endswith("opt"):
        moments(path)
    else:
        write_tensors(path, {"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 15, 16, 24, 40, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        code, found, text = ask(path)
        assert (code, found["whole"]) == (1, False), size
        assert "cut short" in found["fault"], size
        assert text.startswith("path   ")


def test_safetensors_by_itself(tmp_path, ask):
    path = tmp_path / "anything"
    write_tensors(path, {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)})
    code, found, text = ask(path)
    assert code == 0
    assert found["what"] == "a safetensors file"
    assert found["precision"] == "F32, BF16"
    assert found["parameters"] == {"total": 7}
    assert "checksum" in rows(text)["whole"]
    assert text.splitlines()[-2:] == ["b       scalar  F32", "a       2 x 3   BF16"]


def test_the_files_of_a_checkpoint_are_compared_with_its_manifest(run, ask):
    for path in newest(run).iterdir():
        code, found, _ = ask(path)
        assert (code, found["whole"]) == (0, True), path
    path = newest(run) / "model.safetensors"
    _, found, text = ask(path)
    assert rows(text)["whole"] == "yes, by its size and SHA-256, which MANIFEST.json tells"
    total, active = GOLDEN.parameter_counts()
    assert found["parameters"] == {"total": total, "active": active}
    _, found, _ = ask(newest(run) / "optimizer.safetensors")
    assert found["what"] == "optimizer state of a checkpoint (safetensors)"
    assert found["step"] == 6
    _, found, _ = ask(newest(run) / "trainer_state.json")
    assert (found["what"], found["step"]) == ("the trainer's state in a checkpoint", 6)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, found, _ = ask(path)
    assert (code, found["whole"]) == (1, False)
    assert "another SHA-256 than MANIFEST.json beside it says" in found["fault"]


def test_a_manifest(run, ask):
    path = newest(run) / "MANIFEST.json"
    code, found, _ = ask(path)
    assert code == 0
    assert (found["step"], found["files"]) == (6, 5)
    changed = json.loads(path.read_bytes()) | {"step": 8}
    path.write_text(json.dumps(changed))
    code, found, _ = ask(path)
    assert code == 1
    assert "was changed after it was written" in found["fault"]
    relisted(newest(run), files={"../x": {"bytes": 1, "sha256": ""}})
    code, found, _ = ask(path)
    assert code == 1
    assert "lists ../x, which is not a plain file name" in found["fault"]


def test_a_checkpoint(run, ask):
    code, found, text = ask(newest(run))
    assert code == 0
    page = rows(text)
    assert page["what"] == "a checkpoint of a run"
    assert page["whole"] == "yes, by the size and SHA-256 of each of its files"
    assert (found["step"], found["updates"], found["precision"]) == (6, 6, "F32")
    assert found["tensor_count"] == 27
    (newest(run) / "config.json").unlink()
    code, found, _ = ask(newest(run))
    assert code == 1
    assert found["fault"] == "config.json is missing"


def test_a_run(run, ask):
    before = state_of(run)
    code, found, text = ask(run)
    assert code == 0
    page = rows(text)
    assert page["what"] == "the directory of a run"
    assert page["checkpoints"] == "6, 3"
    assert page["whole"].startswith("yes, by its newest checkpoint alone, step-00000006")
    assert found["step"] == 6
    assert found["last_score"] == {"val_loss": 1.5, "step": 6}
    assert found["bytes"] == sum(e.stat().st_size for e in run.rglob("*") if e.is_file())
    assert state_of(run) == before
    os.truncate(newest(run) / "model.safetensors", 10)
    code, found, _ = ask(run)
    assert code == 1
    assert "step-00000006, its newest checkpoint, is damaged: model.safetensors" in found["fault"]


def test_a_model_directory(run, ask):
    for name in ("MANIFEST.json", "trainer_state.json", "optimizer.safetensors"):
        (newest(run) / name).unlink()
    code, found, _ = ask(newest(run))
    assert code == 0
    assert found["what"] == "a model as Hugging Face keeps it"
    assert found["whole"] is None
    assert found["parameters"]["total"] == GOLDEN.parameter_counts().total


def test_the_texts_of_a_run(run, ask):
    expected = {
        "config.toml": "the configuration of a run (config.toml)",
        "metrics.jsonl": "the steps and evaluations of a run (lines of JSON)",
        "guard.jsonl": "the skips, spikes and rollbacks of a run (lines of JSON)",
        "data/corpus.json": "the record of a run's tokens",
        "data/tokenizer.json": "a tokenizer (tokenizer.json of Hugging Face)",
        "data/../corpus.bin.json": "the record beside a token file",
    }
    for name, what in expected.items():
        code, found, _ = ask(run / name)
        assert (code, found["what"]) == (0, what), name
        # by content alone, too
        other = run / "other"
        other.write_bytes((run / name).read_bytes())
        assert ask(other)[1]["what"] == what, name
    _, found, _ = ask(run / "metrics.jsonl")
    assert (found["rows"], found["starts"]) == (7, 1)
    assert found["last_loss"] == {"loss": 5 / 6, "step": 6}
    _, found, _ = ask(run / "guard.jsonl")
    assert found["kinds"] == {"skip": 1}
    _, found, _ = ask(run / "data" / "tokenizer.json")
    assert "<|endoftext|>" in found["special_tokens"]


def test_rows_that_are_none(run, ask):
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'oops\n{"start": 1, "st')
    code, found, _ = ask(path)
    assert code == 1
    assert found["fault"] == "line 8 cannot be read; readers pass over it"
    assert "its last line is torn" in found["notes"][0]


def test_a_token_file(tmp_path, ask):
    path = tmp_path / "ids.bin"
    TokenFile.write(path, list(range(100)))
    code, found, _ = ask(path)
    assert (code, found["whole"]) == (0, None)
    assert (found["tokens"], found["max_id"]) == (100, 99)
    record = {"format": 1, "tokens": 100, "max_id": 99, "sha256": found["sha256"]}
    record["file"] = {"bytes": 400}
    (tmp_path / "ids.bin.json").write_text(json.dumps(record))
    code, found, text = ask(path)
    assert (code, found["whole"]) == (0, True)
    assert rows(text)["whole"] == "yes, by its size and SHA-256, which ids.bin.json tells"
    for change, fault in (
        ({"max_id": 98}, "its largest id is 99, and ids.bin.json says otherwise"),
        ({"sha256": "0"}, "another SHA-256 than ids.bin.json beside it says"),
        ({"file": {"bytes": 404}}, "has 400 bytes, and ids.bin.json beside it says 404"),
    ):
        (tmp_path / "ids.bin.json").write_text(json.dumps(record | change))
        code, found, _ = ask(path)
        assert code == 1
        assert fault in found["fault"]
    path.write_bytes(path.read_bytes()[:-1])
    code, found, _ = ask(path)
    assert code == 1
    assert "not a multiple of the 4 bytes" in found["fault"]


FOREIGN = {
    "a pickle file; fastbrain never opens these": pickle.dumps({"a": 1}),
    "a pickle file; ": pickle.dumps([print], protocol=0),
    "a gzip archive": b"\x1f\x8b\x08" + bytes(99),
    "a program or library (ELF)": b"\x7fELF" + bytes(99),
    "a numpy array": b"\x93NUMPY" + bytes(99),
    "text, which is nothing that": b"Call me Ishmael.\n",
    "a JSON object with the keys text;": b'{"text": "Call me Ishmael."}',
    "text that begins like JSON and is not": b"{Call me Ishmael.}",
    "lines of JSON with the fields text;": b'{"text": "Call me Ishmael."}\n' * 2,
    "text, or TOML without a setting": b"name = 'Ishmael'\n",
    "a file of bytes that nothing": bytes(range(128, 256)),
    "an empty file": b"",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_ours_is_told_by_what_it_looks_like(tmp_path, ask, what):
    path = tmp_path / "file"
    path.write_bytes(FOREIGN[what])
    code, found, text = ask(path)
    assert (code, found) == (2, {})
    assert text.startswith(f"fastbrain: {path} is {what}")


def test_a_file_of_torch_save_is_not_opened(tmp_path, ask):
    path = tmp_path / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(print))
    code, _, text = ask(path)
    assert code == 2
    assert "a zip archive around a pickle, as torch.save writes it; fastbrain never" in text


def test_what_cannot_be_read_is_told(tmp_path, ask):
    code, _, text = ask(tmp_path / "none")
    assert (code, text[:22]) == (2, "fastbrain: cannot read")
    code, _, text = ask(tmp_path)
    assert code == 2
    assert "is a directory that is no run, no checkpoint and no model" in text
    os.mkfifo(tmp_path / "pipe")
    code, _, text = ask(tmp_path / "pipe")
    assert code == 2
    assert text.endswith("pipe is no plain file\n")


def test_a_name_cannot_speak_to_the_terminal(tmp_path, ask):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"\x1b[2J\x07evil": torch.zeros(1)}, {"format": "\x1b]0;x\x07"})
    code, found, text = ask(path)
    assert code == 0
    assert "\x1b" not in text
    assert "\\x1b[2J\\x07evil" in text
    assert found["tensors"][0]["name"] == "\x1b[2J\x07evil"


def test_a_large_file_is_not_loaded(tmp_path, ask):
    # 4 GB of nothing on the disk, answered from the header
    path = tmp_path / "huge.safetensors"
    header = {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + 4 * 10**9)
    started = time.process_time()
    code, found, _ = ask(path)
    assert (code, found["parameters"]) == (0, {"total": 10**9})
    assert time.process_time() - started < 1
