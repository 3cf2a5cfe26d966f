"""The check for machines with a card runs, line for line, on machines without.

Its parts may fail, hang and crash on a card that nobody has tried: what becomes of them is shown
here with parts that do nothing else.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.device_check import child, conduct, table
from bench.device_check.__main__ import main
from bench.device_check.journal import Journal
from bench.device_check.parts import PARTS, Part

ROOT = Path(__file__).parent.parent
HEAD = "import os, signal, subprocess, sys, time\nfrom bench.device_check.journal import Skipped\n"
FINE = """
def fine():
    return {"pid": os.getpid()}
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Makes a part of its source: functions without arguments, and a dictionary CASES of them."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(source, name="made"):
        cases = "\ndef cases(dry):\n    return list(CASES.items())\n"
        (tmp_path / f"{name}.py").write_text(HEAD + FINE + source + cases)
        return Part(name, name, 60, "what a test made")

    return make


def run(made, limit_s=60.0):
    return conduct.run(made, limit_s, dry=True)


def test_cases_that_pass_make_a_part_that_passed(part):
    found = run(part("CASES = {'a': fine, 'b': fine}"))
    assert found["status"] == "passed"
    assert list(found["cases"]) == ["a", "b"]
    assert "error" not in found
    # of one process
    assert found["cases"]["a"]["pid"] == found["cases"]["b"]["pid"] != os.getpid()


def test_a_case_that_fails_does_not_stop_the_others(part):
    found = run(part("def bad():\n    assert 1 == 2, 'no'\nCASES = {'a': bad, 'b': fine}"))
    assert found["status"] == "failed"
    assert "AssertionError: no" in found["cases"]["a"]["failed"]
    assert "pid" in found["cases"]["b"]


def test_a_skipped_case_is_no_failure(part):
    source = "def small():\n    raise Skipped('the card is too small')\nCASES = {'a': small}"
    found = run(part(source))
    assert found["status"] == "passed"
    assert found["cases"]["a"]["skipped"] == "the card is too small"


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_all_it_started(part, tmp_path):
    source = f"""
def hang():
    helper = subprocess.Popen(["sleep", "600"])
    open({str(tmp_path / "pid")!r}, "w").write(str(helper.pid))
    time.sleep(600)

CASES = {{"a": fine, "b": hang, "c": fine}}
"""
    begun = time.monotonic()
    found = run(part(source), limit_s=6.0)
    assert time.monotonic() - begun < 60
    assert found["status"] == "over budget"
    assert "killed in 'b'" in found["error"]
    assert list(found["cases"]) == ["a"]
    helper = Path("/proc", (tmp_path / "pid").read_text())
    for _ in range(100):
        # gone, or dead and not yet collected by whoever adopts it
        if not helper.exists() or " Z " in (helper / "stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("what the part had started is still there")


def test_a_crash_fails_its_case_and_the_rest_runs_in_another_process(part):
    source = """
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

CASES = {"a": fine, "b": crash, "c": fine}
"""
    found = run(part(source))
    assert found["status"] == "failed"
    assert found["cases"]["b"]["failed"].startswith("the process ended with SIGSEGV")
    assert found["cases"]["a"]["pid"] != found["cases"]["c"]["pid"]


def test_a_lost_gpu_costs_a_process_and_no_other_case(part):
    source = """
def lost():
    raise RuntimeError("CUDA error: device-side assert triggered")

CASES = {"a": fine, "b": lost, "c": fine}
"""
    found = run(part(source))
    assert found["status"] == "failed"
    assert "device-side assert" in found["cases"]["b"]["failed"]
    assert found["cases"]["a"]["pid"] != found["cases"]["c"]["pid"]


def test_crashes_without_end_come_to_an_end(part):
    source = "CASES = {str(i): lambda: os._exit(3) for i in range(20)}"
    found = run(part(source))
    assert found["status"] == "failed"
    assert len(found["cases"]) == conduct.PROCESSES


def test_a_part_that_cannot_start_says_why(part):
    found = run(part("import no_such_module\nCASES = {}"))
    assert found["status"] == "failed"
    assert "no_such_module" in found["error"]


@pytest.fixture
def watched(part, tmp_path, monkeypatch):
    """Runs a part in this process, by a clock that only its cases move; the journal of it."""

    def run(source, until):
        made = part(source)
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(child, "time", SimpleNamespace(time=lambda: clock.now))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, made.module, raising=False)
        importlib.import_module(made.module).clock = clock
        path = tmp_path / "journal.json"
        path.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["child", made.module, str(path), str(until)])
        child.main()
        monkeypatch.delitem(sys.modules, made.module)
        return Journal(path)

    return run


SLOW = """
def slow():
    clock.now += 10
    return {}

"""


def test_no_case_begins_that_would_probably_be_killed(watched):
    cases = "CASES = {'a': slow, 'b': slow, 'c': fine}"
    found = watched(SLOW + cases, until=25)
    assert (list(found.cases), found.left_out) == (["a", "b"], "c")
    assert watched(SLOW + cases, until=30).left_out is None


def test_an_extra_without_the_time_it_may_take_is_skipped(watched):
    extra = (
        SLOW + "CASES = {}\n"
        "class Extras(dict):\n"
        "    def items(self):\n"
        "        return [('a', slow), ('b', slow, 9.0), ('c', fine, 8.0)]\n"
        "CASES = Extras()"
    )
    found = watched(extra, until=18)
    assert "may take 9 s" in found.cases["b"]["skipped"]
    assert "pid" in found.cases["c"]
    assert found.left_out is None


MACHINE = """
def machine():
    return {"machine": {"card": "A card (12 GB)", "torch": "0"}, "device": "cuda"}

CASES = {"machine": machine}
"""


def checked(arguments, *parts):
    """The exit status of a run, and its file."""
    with pytest.raises(SystemExit) as ended:
        main(arguments, parts)
    return ended.value.code


def test_the_file_and_the_table_hold_what_every_part_found(part, tmp_path, capfd):
    where = part(MACHINE, "where")
    bad = part("def bad():\n    return {'x': float('nan'), 'y': 1 / 0}\nCASES = {'a': bad}", "bad")
    good = part("def nan():\n    return {'x': float('nan')}\nCASES = {'a': nan}", "good")
    assert checked(["--out", str(tmp_path / "out")], where, bad, good) == 1
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "A-card-12-GB.json"
    document = json.loads(path.read_text())
    assert document["kind"] == "device check"
    assert document["machine"]["card"] == "A card (12 GB)"
    assert {n: p["status"] for n, p in document["parts"].items()} == {
        "where": "passed",
        "bad": "failed",
        "good": "passed",
    }
    assert document["parts"]["good"]["cases"]["a"]["x"] == "nan"
    printed = capfd.readouterr().out.split("part   ")[1]
    assert "1 failed: a" in printed
    assert checked(["--out", str(tmp_path / "out")], where, good) == 0
    assert checked(["--out", str(tmp_path / "out"), "--only", "good"], where, bad, good) == 0


def test_a_python_without_what_it_needs_is_named_in_a_sentence(part, capfd):
    assert checked([], part("import no_such_module\nCASES = {}")) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(sys.executable)
    assert said.endswith("No module named 'no_such_module'")


def test_a_dry_run_writes_only_where_it_is_told(part, tmp_path, monkeypatch):
    monkeypatch.setattr(conduct, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    where = part(MACHINE, "where")
    before = sorted(tmp_path.rglob("*.json"))
    assert checked(["--dry"], where) == 0
    assert sorted(tmp_path.rglob("*.json")) == before
    assert checked([], where) == 0
    assert [path.name for path in (tmp_path / "bench/results").iterdir()] == ["A-card-12-GB.json"]


def test_what_a_part_leaves_of_its_budget_goes_to_the_next(part, monkeypatch):
    given = []

    def noting(made, limit_s, dry):
        given.append(limit_s)
        return run_part(made, limit_s, dry)

    run_part = conduct.run
    monkeypatch.setattr(conduct, "run", noting)
    parts = [part(MACHINE, "where"), part("CASES = {}", "second"), part("CASES = {}", "third")]
    assert checked(["--dry", "--budget", "2"], *parts) == 0
    assert given[0] == pytest.approx(120, abs=1)
    assert 120 < given[1] < 240
    assert given[1] < given[2] < 360


def test_the_table_compares_with_peers_and_with_the_plan():
    part = {"status": "passed", "seconds": 1.0, "budget_s": 2}
    ratio = {"ms": {"fused": 2.0, "SDPA": 3.0}, "fastest_peer": "SDPA", "ratio": 1.5}
    step = {"tokens_per_s": 52_890.4, "peak_bytes": 3 * 2**30, "predicted_peak_bytes": 4 * 2**30}
    operations = {"attention forward": ratio, "dry": {"ms": {"fused": None}}}
    parts = {
        "operations": part | {"cases": operations},
        "steps": part | {"cases": {"chapter, fastbrain": step, "dry": {"tokens_per_s": None}}},
    }
    lines = [" ".join(line.split()) for line in table.text({"parts": parts}).splitlines()]
    assert "attention forward 2.000 3.000 1.50 SDPA" in lines
    assert "chapter, fastbrain 52,890 3,072 4,096 75%" in lines
    assert not any(line.startswith("dry") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "twins,nonsense"], ["'nonsense'", "environment", "steps"]),
        (["--budget", "0"], ["must be a number above 0, got 0"]),
        (["--budget", "much"], ["must be a number above 0, got much"]),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(arguments, words, capsys):
    assert checked(arguments, *PARTS) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_help_lists_every_part(capsys):
    assert checked(["--help"], *PARTS) == 0
    said = capsys.readouterr().out
    assert all(part.name in said for part in PARTS)


def test_the_whole_check_takes_eight_minutes_at_most():
    assert sum(part.budget_s for part in PARTS if not part.asked) <= 480
    assert all(importlib.util.find_spec(part.module) for part in PARTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_machine_without_a_card_is_told_of_the_dry_run(tmp_path):
    done = subprocess.run(
        [ROOT / "bench/device_check.sh", "--out", tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert "--dry" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_dry_run_passes_every_part(tmp_path):
    arguments = ["--dry", "--budget", "3", "--out", "found"]
    subprocess.run(
        [ROOT / "bench/device_check.sh", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    document = json.loads((tmp_path / "found/CPU.json").read_text())
    assert list(document["parts"]) == [part.name for part in PARTS if not part.asked]
    assert document["machine"]["command"].endswith(" ".join(arguments))
    cases = {name: part["cases"] for name, part in document["parts"].items()}
    assert {"attention forward", "adam_step"} <= cases["operations"].keys()
    assert all("fused" in case["ms"] for case in cases["operations"].values())
    assert all(case["equal_bits"] for case in cases["graphs"].values())
    skipped = [name for part in cases.values() for name, case in part.items() if "skipped" in case]
    assert not [name for name in skipped if "graphs" not in name and "Hugging Face" not in name]
