"""Many shapes, a process each: what is run, what is written, and what a failure leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_sweep_arch import SMALL, fake

from fastbrain.errors import InvalidConfig, Io
from fastbrain.sweep_arch import command, table


@pytest.fixture
def document(capsys):
    """The figures of one measurement, as a row's process prints them."""
    command.main([*SMALL, "--device", "cpu", "--json"], fake())
    return json.loads(capsys.readouterr().out)


class Launcher:
    """Answers for the processes; `answers` are exit codes, documents, or exceptions."""

    def __init__(self, *answers, stderr=""):
        self.answers, self.stderr = list(answers), stderr
        self.words: list[list[str]] = []

    def __call__(self, words):
        self.words.append(words)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        code, out = (answer, "") if isinstance(answer, int) else (0, json.dumps(answer))
        return subprocess.CompletedProcess(words, code, out, self.stderr if code else "")


def shapes(tmp_path, text):
    path = tmp_path / "shapes.txt"
    path.write_text(text)
    return path


def written(path):
    return json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".md").read_text()


def test_real_rows_run_apart_and_a_bad_one_does_not_end_the_rest(tmp_path, capsys):
    path = shapes(tmp_path, "1000 100\n\n# small\n  1000 64 1 2 16 0  # dense\n")
    before = path.read_bytes()
    assert command.main(["--table", str(path), "--device", "cpu", "--tokens", "1M"]) == 1
    captured = capsys.readouterr()
    bad, good = captured.out.splitlines()
    assert bad.startswith("1000 100  ")
    assert "FAILED: d_model is 100" in bad
    assert good.startswith("v1000 d64 L1 2x16 dense")
    assert good.endswith(" days for 1M")
    assert captured.err.startswith("fastbrain: d_model is 100")
    found, markdown = written(path)
    assert [row["arguments"] for row in found["rows"]] == ["1000 100", "1000 64 1 2 16 0"]
    assert found["rows"][0]["result"] is None
    assert found["rows"][1]["failure"] is None
    assert found["rows"][1]["result"]["parameters"]["total"] > 64_000
    assert "| `1000 100` | FAILED: d_model is 100" in markdown
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["shapes.json", "shapes.md", "shapes.txt"]


def test_flags_come_before_a_rows_own_words(tmp_path, document):
    launch = Launcher(document, document)
    path = shapes(tmp_path, "1000 64 --steps 7 'a b'\n2000 128")
    assert table.run(path, ["--steps", "6"], launch=launch) == 0
    assert launch.words == [
        ["--steps", "6", "1000", "64", "--steps", "7", "a b", "--json"],
        ["--steps", "6", "2000", "128", "--json"],
    ]


def test_a_crash_leaves_every_row_that_was_measured(tmp_path, document):
    path = shapes(tmp_path, "1\n2\n3")
    with pytest.raises(ZeroDivisionError):
        table.run(path, [], launch=Launcher(document, document, ZeroDivisionError()))
    found, markdown = written(path)
    assert [row["arguments"] for row in found["rows"]] == ["1", "2"]
    assert [line[:5] for line in markdown.splitlines() if line.startswith("| `")] == [
        "| `1`",
        "| `2`",
    ]


def test_ctrl_c_ends_the_table_and_keeps_its_rows(tmp_path, document, monkeypatch, capsys):
    path = shapes(tmp_path, "1\n2")
    monkeypatch.setattr(table, "_launch", Launcher(document, KeyboardInterrupt()))
    assert command.main(["--table", str(path)]) == 130
    assert capsys.readouterr().err == ""
    assert len(written(path)[0]["rows"]) == 1


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no process groups")
def test_ctrl_c_in_a_terminal_ends_all_of_it_quietly(tmp_path):
    path = shapes(tmp_path, "8000 256 4 8 256\n" * 3)
    call = [sys.executable, "-m", "fastbrain.sweep_arch", "--table", str(path), "--device", "cpu"]
    running = subprocess.Popen(
        call,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background jobs, and what they start, do not hear Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not path.with_suffix(".md").exists() and running.poll() is None:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    assert running.communicate(timeout=60) == ("", "")
    assert running.returncode == 130


def test_json_takes_the_place_of_the_lines(tmp_path, document, capsys):
    path = shapes(tmp_path, "1\n2")
    assert table.run(path, ["--json"], json_wanted=True, launch=Launcher(document, 1)) == 1
    assert json.loads(capsys.readouterr().out) == written(path)[0]


@pytest.mark.parametrize(
    ("code", "stderr", "failure"),
    [
        (1, "fastbrain: v1 d2: out of memory: none left\nIn order:\n  6. fewer", "v1 d2: out of"),
        (2, "usage: x\npython -m fastbrain.sweep_arch: error: argument vocab", "python -m fast"),
        (2, "fastbrain: warning: it is dense\nfastbrain: seq must be", "seq must be"),
        (1, "Traceback\n  File\nRuntimeError: shapes differ\n\n", "RuntimeError: shapes differ"),
        (3, "", "exit code 3"),
        (-signal.SIGKILL, "", "ended by signal 9, most likely because the machine ran out"),
        (-signal.SIGSEGV, "", "ended by signal 11"),
    ],
)
def test_a_failure_is_told_in_a_line(code, stderr, failure, tmp_path, capsys):
    path = shapes(tmp_path, "1000")
    assert table.run(path, [], launch=Launcher(code, stderr=stderr)) == 1
    (row,) = written(path)[0]["rows"]
    assert row["failure"].startswith(failure)
    assert "\n" not in row["failure"]
    captured = capsys.readouterr()
    assert captured.err == stderr
    assert captured.out.startswith(f"{'1000':30}  FAILED: {failure}")


def test_only_a_kill_is_taken_for_memory(tmp_path):
    path = shapes(tmp_path, "1000")
    table.run(path, [], launch=Launcher(-signal.SIGSEGV))
    assert written(path)[0]["rows"][0]["failure"] == "ended by signal 11"


@pytest.mark.parametrize(
    ("row", "failure"),
    [
        ("1000 --table other.txt", "a row is one shape, not a table"),
        ("1000 --table=other.txt", "a row is one shape, not a table"),
        ("1000 'unclosed", "this is no command line: No closing quotation"),
    ],
)
def test_a_row_that_is_no_shape_is_not_run(row, failure, tmp_path):
    path, launch = shapes(tmp_path, row), Launcher()
    assert table.run(path, [], launch=launch) == 1
    assert written(path)[0]["rows"][0]["failure"].startswith(failure)
    assert not launch.words


def test_a_row_that_prints_no_figures_fails(tmp_path):
    path = shapes(tmp_path, "--help")
    launch = lambda words: subprocess.CompletedProcess(words, 0, "usage: ...", "")  # noqa: E731
    assert table.run(path, [], launch=launch) == 1
    assert "is there a --help in it" in written(path)[0]["rows"][0]["failure"]


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing\n  # here\n"])
def test_a_file_without_shapes_is_refused(text, tmp_path):
    with pytest.raises(InvalidConfig, match="has no shapes: write one a line"):
        table.run(shapes(tmp_path, text), [])


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_bytes(b"\xff\xfe1000")
    with pytest.raises(InvalidConfig, match="is not text in UTF-8"):
        table.run(path, [])


@pytest.mark.parametrize("name", ["shapes.md", "shapes.json"])
def test_results_never_replace_the_file(name, tmp_path):
    path = tmp_path / name
    path.write_text("1000 64\n")
    with pytest.raises(InvalidConfig, match="the results would replace it"):
        table.run(path, [], launch=Launcher())
    assert os.listdir(tmp_path) == [name]
    assert path.read_text() == "1000 64\n"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_results_do_not_replace_the_file_under_another_name(link, tmp_path):
    path = shapes(tmp_path, "1000 64\n")
    link(path, tmp_path / "shapes.md")
    with pytest.raises(InvalidConfig, match="the results would replace it"):
        table.run(path, [], launch=Launcher())
    assert path.read_text() == "1000 64\n"


def test_a_place_that_cannot_be_written_is_found_before_the_first_row(tmp_path, document):
    path, launch = shapes(tmp_path, "1000"), Launcher(document)
    (tmp_path / "shapes.md").mkdir()
    with pytest.raises(Io, match=r"cannot write .*shapes\.md"):
        table.run(path, [], launch=launch)
    assert not launch.words


def test_a_missing_file_is_refused(capsys):
    assert command.main(["--table", "/nowhere/shapes.txt"]) == 2
    assert capsys.readouterr().err.startswith("fastbrain: cannot read /nowhere/shapes.txt: No such")


def test_a_shape_beside_a_table_is_refused(tmp_path, capsys):
    path = shapes(tmp_path, "1000 64")
    with pytest.raises(SystemExit) as exit:
        command.main(["1000", "--table", str(path)])
    assert exit.value.code == 2
    assert "with --table the shapes come from the file: leave out 1000" in capsys.readouterr().err


def test_the_table_shows_what_was_measured_and_where(tmp_path, document):
    gpu = {"driver": "615.71.09"}
    memory = {"peak_bytes": 5309 << 20, "device_peak_bytes": 6779 << 20}
    card = document | {
        "gpu": gpu,
        "memory": memory,
        "mfu": 0.348,
        "mixed_precision": True,
        "device": {"device": "cuda:0", "name": "RTX 3060", "threads": None},
        "warnings": ["another process | uses this GPU"],
    }
    path = shapes(tmp_path, "1000 64\n2000 '|'\n3000 64")
    table.run(path, [], launch=Launcher(document, card, card))
    torch = document["versions"]["torch"]
    text = written(path)[1]
    assert text.startswith(f"    python -m fastbrain.sweep_arch --table {path}\n")
    assert text.count(f"- RTX 3060, driver 615.71.09, BF16 operands, torch {torch}, ") == 1
    first, second, _ = (line for line in text.splitlines() if line.startswith("| `"))
    assert first.endswith("| unknown | 900 MiB |  | 2260.6 for 50B |")
    assert "| 256 | 128-640 |" in first
    assert "| 34.8% | 5309 MiB | 6779 MiB |" in second
    assert text.endswith("- `3000 64`: another process | uses this GPU\n")
    cells = {line.replace("\\|", "").count("|") for line in text.splitlines() if line[:1] == "|"}
    assert cells == {11}


def test_one_program_is_started_a_row():
    done = table._launch(["1000", "100"])
    assert done.returncode == 2
    assert done.args == [sys.executable, "-m", "fastbrain.sweep_arch", "1000", "100"]
