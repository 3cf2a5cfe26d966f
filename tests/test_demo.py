"""The demo does what it says at the size of a toy, and a resume that is not exact makes it fail."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastbrain import TransformerLm

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_demo(out, *options):
    return subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--quick", "--out", out, *options],
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run into a directory that another run has left in disorder."""
    out = tmp_path_factory.mktemp("demo")
    (out / "notes.txt").write_text("mine")
    for name in ("train.bin", "middle.rbw", "middle.rbw.opt", "resumed.rbw", "resumed.json"):
        (out / name).write_text("cut short")
    done = run_demo(out)
    assert (done.returncode, done.stderr) == (0, "")
    return SimpleNamespace(out=out, said=done.stdout)


@pytest.fixture
def module(monkeypatch):
    """The demo's functions and texts."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo")


def test_it_says_what_it_trains(demo):
    first, second = demo.said.splitlines()[:2]
    assert re.fullmatch(r"vocabulary 512, [\d,]+ train tokens, [\d,]+ held-out tokens", first)
    assert re.fullmatch(r"\d\.\dM total / \d\.\dM active \(1\.\d\dx\)", second)


def test_the_held_out_loss_falls(demo):
    rows = re.findall(r"^ *(\d+) 0\.\d{5} +(\d\.\d{4}) +(\d\.\d{4})$", demo.said, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [*range(2, 17, 2), *range(10, 17, 2)]
    held_out = [float(loss) for _, _, loss in rows[:8]]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < held_out[0] - 0.2


def test_the_resumed_run_prints_the_rows_of_the_live_one(demo):
    live, resumed = demo.said.split("resuming from the step-8 checkpoint in a new process\n")
    assert resumed.startswith("optimizer step counter restored: 8\n")
    rows = [line for line in live.splitlines() if re.match(r" +1[0-6] 0\.", line)]
    assert len(rows) == 4
    assert "\n".join(rows) in resumed


def test_the_resume_is_exact(demo, module):
    module.compare(demo.out)
    assert demo.said.count("  the same\n") == 7
    live, resumed = (demo.out / f"{run}.rbw.opt" for run in ("live", "resumed"))
    assert live.read_bytes() == resumed.read_bytes()


def test_it_answers_its_questions(demo, module):
    for question, answer in module.QUESTIONS.items():
        assert f"  Q: {question}\n  A: {answer}\n" in demo.said


def test_it_leaves_the_files_of_others(demo):
    assert (demo.out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("what", [pytest.param("weights", marks=pytest.mark.slow), "moments"])
def test_a_resume_that_is_not_exact_fails(demo, module, what, tmp_path, capsys):
    out = shutil.copytree(demo.out, tmp_path / "out")
    model = TransformerLm.load_bin(out / "middle.rbw")
    model.load_optimizer_state(out / "middle.rbw.opt")
    getattr(model, what)()[-1][1].mul_(1.0001)
    model.save_bin(out / "middle.rbw")
    model.save_optimizer_state(out / "middle.rbw.opt")
    assert run_demo(out, "--resume").returncode == 0
    with pytest.raises(SystemExit, match="not the one"):
        module.compare(out)
    assert re.search(r"final weights +[0-9a-f]{20}  NOT [0-9a-f]{20}", capsys.readouterr().out)
