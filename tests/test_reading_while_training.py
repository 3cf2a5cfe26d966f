"""Whoever reads a run while it trains sees what was committed, and never an error."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from training_runs import entered

from fastbrain.commands import inspect, verify
from fastbrain.training import guard_log, manifest, metrics
from fastbrain.training.run_dir import RunDir

# saves after every step and keeps few, so that checkpoints come and go all the time
WRITER = """
import sys, torch
from fastbrain import train
torch.set_num_threads(1)
sys.exit(train.main(["tiny.toml", "--run", "run", "--json", "train.max_steps=100000",
    "save.interval_steps=1", "save.keep=1", "eval.interval=7", "eval.samples=1"]))
"""


@pytest.fixture
def writer(tmp_path):
    with entered(tmp_path):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            while not any(Path("run/checkpoints").glob("step-*")):
                assert process.poll() is None, process.stdout.read().decode()
            yield process
        finally:
            process.kill()
            process.communicate()


def asked(command: ModuleType) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["run"]))


def read_once(seen: list[int]) -> None:
    """Everything that a reader may do; `seen` are the newest steps up to now."""
    assert asked(verify) == 0
    assert asked(inspect) == 0
    run = RunDir.open(Path("run"))
    newest = run.checkpoints()[-1]
    reason = manifest.fault(newest.path, run.run_id, newest.step)
    assert reason is None or not newest.path.exists(), reason
    rows = [row for row in metrics.read(run.metrics) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    assert guard_log.read(run.guard_log) == []
    assert newest.step >= seen[-1]
    seen.append(newest.step)


def read_again_and_again(writer: subprocess.Popen, times: int) -> None:
    seen = [0]
    for _ in range(times):
        read_once(seen)
        assert writer.poll() is None, writer.stdout.read().decode()
    assert len(set(seen)) > times / 10, "hardly anything was written meanwhile"
    Path("run/STOP").touch()
    said = writer.communicate(timeout=60)[0].decode()
    assert writer.returncode == 75, said
    assert "warning" not in said
    assert not list(Path("run/checkpoints").glob("*.corrupt"))


def test_fifty_readings_of_a_run_that_saves_every_step(writer):
    read_again_and_again(writer, 50)


@pytest.mark.slow
def test_five_hundred_readings_of_a_run_that_saves_every_step(writer):
    read_again_and_again(writer, 500)
