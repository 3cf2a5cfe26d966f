"""The command line: help to paste, answers without torch, one program by several names."""

import os
import subprocess
import sys

import pytest

from fastbrain import cli, train
from fastbrain.training import command
from fastbrain.training.command import Request


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_help_comes_without_torch():
    script = """
import sys
from fastbrain.cli import main
verbs = (
    "train", "resume", "sft", "generate", "chat", "eval", "prepare", "tokenizer", "export",
    "import", "doctor", "pause", "report", "verify", "inspect", "plan", "bench",
)
for arguments in (["--help"], *([verb, "--help"] for verb in verbs), ["fly"], []):
    try:
        main(arguments)
    except SystemExit as exit:
        print("exit", exit.code)
assert "torch" not in sys.modules
"""
    done = process("-c", script)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == [
        *["exit 0"] * 18, "exit 2", "exit 2",
    ]  # fmt: skip
    assert "fastbrain train tiny-cpu data.train=corpus.txt --run runs/first" in done.stdout
    assert "fastbrain resume runs/first" in done.stdout
    assert "fastbrain plan 300m-moe-12gb --card rtx4090" in done.stdout
    assert "fastbrain bench attention" in done.stdout
    assert "124m, 300m-moe-12gb, 30m, sft, tiny-cpu" in done.stdout


@pytest.mark.parametrize("name", [["-m", "fastbrain", "train"], ["-m", "fastbrain.train"]])
def test_the_program_has_two_names(name, tmp_path):
    done = process(*name, "tiny-cpu", f"data.train={tmp_path}/none.txt")
    assert done.returncode == 2
    assert done.stderr == f"fastbrain: data.train: there is no file or folder {tmp_path}/none.txt\n"


def requested(monkeypatch, arguments: list[str]) -> Request:
    asked: list[Request] = []
    monkeypatch.setattr(train, "run", lambda found, _: asked.append(found.request) or 0)
    assert cli.main(arguments) == 0
    return asked[0]


def test_overrides_stand_before_and_after_options(monkeypatch, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("x")
    request = requested(
        monkeypatch,
        ["train", "tiny-cpu", "train.seed=3", "--run", str(tmp_path / "run"), f"data.train={text}",
         "--json", "train.seed=4"],
    )  # fmt: skip
    assert request.settings.train.seed == 4
    assert request.settings.data.train == str(text)
    assert (request.path, request.going_on, request.json) == (tmp_path / "run", None, True)


def test_a_run_is_named_after_its_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("x")
    request = requested(monkeypatch, ["train", "tiny-cpu", "data.train=corpus.txt"])
    assert str(request.path) == "runs/tiny-cpu"
    # it holds from wherever the run is resumed
    assert request.settings.data.train == str(tmp_path / "corpus.txt")


def test_what_is_no_argument_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "tiny-cpu", "--rum", "x"])
    assert "unrecognized arguments: --rum" in capsys.readouterr().err
    assert cli.main(["train", "tiny-cpu", "--run", "x", "train.seed"]) == command.REFUSED
    assert "an override is written as table.key=value" in capsys.readouterr().err


def test_a_warning_is_a_line_and_not_a_place_in_the_source(monkeypatch, tmp_path, capsys):
    import warnings

    def warned(request, console):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this will be slow", stacklevel=1)
        return 0

    monkeypatch.setattr(train, "run", warned)
    text = tmp_path / "corpus.txt"
    text.write_text("x")
    assert cli.main(["train", "tiny-cpu", f"data.train={text}", "--run", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out == "warning: this will be slow\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_an_output_without_room_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastbrain", "plan"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "fastbrain: cannot write the output: No space left on device\n"


def test_a_reader_that_has_had_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fastbrain", "bench", "--list"],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_before_there_is_anything_to_save_is_a_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "execute", interrupted)
    assert cli.main(["train", "tiny-cpu", "data.train=x"]) == 130
    monkeypatch.setattr(cli, "_said", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "fastbrain: interrupted\n" * 2
