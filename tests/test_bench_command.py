"""`fastbrain bench`: what it refuses before it times anything, and what it makes of a run."""

import argparse
import json
import re
import subprocess
import sys

import pytest
import torch

import fastbrain
from bench import conftest
from bench.compiling import interpreted
from fastbrain.commands import bench

BENCHMARKS = '''"""Naps of several lengths.

And more."""

import time

import pytest


@pytest.mark.parametrize("name", ["fastbrain", "long nap", "longer nap", "absent", "late"])
@pytest.mark.parametrize("case", [pytest.param(0, id="nap")])
def bench_naps(benchmark, case, name):
    if name == "absent":
        pytest.skip("nobody sleeps here")
    benchmark.extra_info["tokens"] = 7
    benchmark(time.sleep, {"fastbrain": 1e-3, "long nap": 1e-2}.get(name, 3e-2))
    assert name != "late", "overslept"
'''
HOOK = """
def pytest_benchmark_update_machine_info(machine_info):
    machine_info["fastbrain"] = {"card": "a pillow", "torch": "2.13"}
"""


@pytest.fixture(autouse=True)
def _outside_of_the_interpreter(monkeypatch):
    # set first, so that what a test makes of it is undone
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    # a worker's name tells pytest-benchmark that nothing is to be timed
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one file of benchmarks, one of which fails."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "bench_naps.py").write_text(BENCHMARKS)
    (folder / "conftest.py").write_text(HOOK)
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_functions = bench_*\n")
    monkeypatch.setattr(fastbrain, "__file__", str(tmp_path / "fastbrain/__init__.py"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--benchmark-max-time=0.01")
    return tmp_path


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


def test_it_needs_no_torch():
    script = "import sys, fastbrain.commands.bench; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_list_says_what_there_is(capsys):
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"attention", "adam", "data", "generation", "training_step"} <= {
        line.split()[0] for line in lines
    }
    assert all(len(line.split()) > 2 for line in lines)


def test_the_list_has_the_first_line_of_a_file(checkout, capsys):
    assert run("--list") == 0
    assert capsys.readouterr().out == "naps  Naps of several lengths.\n"


def test_outside_of_a_checkout_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fastbrain, "__file__", str(tmp_path / "fastbrain/__init__.py"))
    assert run() == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["naps", "atention"], "there is no benchmark 'atention'; there are naps"),
        (["--json", "nowhere/x.json"], "--json names nowhere/x.json, but there is no folder"),
    ],
)
def test_a_slip_is_answered_at_once(checkout, words, message, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_interpreted_kernels_are_not_timed(checkout, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run() == 2
    assert "timings of interpreted kernels mean nothing" in capsys.readouterr().err


def test_a_missing_package_is_named(checkout, monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name[6:] else name)
    assert run() == 2
    assert "need pytest-benchmark, which is not installed" in capsys.readouterr().err


def test_a_run_ends_in_a_table_and_a_file(checkout, capfd):
    target = checkout / "naps.json"
    # one that is not named, and is not run
    (checkout / "bench/bench_rest.py").write_text("raise AssertionError")
    assert run("naps", "--json", str(target)) == 1
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[1] == "nap"
    assert not any("toy" in line for line in lines)
    assert re.fullmatch(r"fastbrain [\d.]+ [\d,]+ tok/s [\d.]+ x long nap", lines[2])
    assert lines[5:7] == [
        "absent skipped: nobody sleeps here",
        "late FAILED: AssertionError: overslept",
    ]
    found = json.loads(target.read_text())
    assert found["kind"] == "operations"
    assert found["command"] == "fastbrain bench naps"
    assert found["machine"] == {"command": found["command"], "card": "a pillow", "torch": "2.13"}
    assert found["toy"] is False
    (row,) = found["rows"]
    assert (row["name"], row["ours"], row["peer"]) == ("nap", "fastbrain", "long nap")
    assert row["ratio"] == row["ms"]["long nap"] / row["ms"]["fastbrain"] > 1
    assert list(row["ms"]) == ["fastbrain", "long nap", "longer nap"]


def test_all_benchmarks_run_unless_some_are_named(checkout, capfd):
    (checkout / "bench/conftest.py").write_text(HOOK.replace("a pillow", "none"))
    kept = BENCHMARKS.replace(', "late"', "")
    (checkout / "bench/bench_naps.py").write_text(kept)
    (checkout / "bench/bench_rest.py").write_text(kept.replace('id="nap"', 'id="rest"'))
    assert run() == 0
    lines = capfd.readouterr().out.splitlines()
    assert {"nap", "rest"} <= set(lines)
    assert "had toy sizes" in lines[-1]


def test_a_file_that_cannot_be_read_fails_the_run(checkout, capfd):
    (checkout / "bench/bench_naps.py").write_text("import nothing_of_that_name\n")
    target = checkout / "naps.json"
    assert run("--json", str(target)) == 1
    assert "nothing was timed, so" in capfd.readouterr().err
    assert not target.exists()


class Configured:
    """pytest's configuration, as far as the benchmarks ask for it."""

    def __init__(self, disabled: bool) -> None:
        self.disabled = disabled

    def getoption(self, name: str, default: bool) -> bool:
        assert (name, default) == ("benchmark_disable", True)
        return self.disabled


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_kernels_are_interpreted_where_nothing_is_timed(monkeypatch, disabled, card):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    conftest.pytest_configure(Configured(disabled))
    assert interpreted() == (disabled and not card)


def test_pytest_refuses_to_time_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(pytest.UsageError, match="timings of interpreted kernels mean nothing"):
        conftest.pytest_configure(Configured(disabled=False))
    conftest.pytest_configure(Configured(disabled=True))


@pytest.mark.slow
def test_an_operation_is_timed_here(tmp_path):
    target = tmp_path / "swiglu.json"
    assert run("swiglu", "--json", str(target)) == 0
    found = json.loads(target.read_text())
    assert {"command", "commit", "date", "torch"} <= found["machine"].keys()
    forward, both = found["rows"]
    assert (forward["name"], both["name"]) == ("swiglu forward", "swiglu forward+backward")
    assert forward["ours"] in ("fused", "reference")
    assert forward["bytes"] > 0
    assert "torch.compile" in forward["ms"] or "torch.compile" in forward["skipped"]
