"""A history written by starts that are killed again and again has each step once."""

import json
import subprocess
import sys

import pytest

from fastbrain.training import metrics

# what a start of a run does to its history: on from the last checkpoint, a row a step
WRITER = """
import json, os, random, signal, sys, time
from pathlib import Path
from fastbrain.training.metrics import Metrics

path, saved, kills = Path("metrics.jsonl"), Path("saved"), int(sys.argv[1])

def start():
    writer = Metrics(path, lambda sentence: os._exit(9))
    step = int(saved.read_text()) if saved.exists() else 0
    while True:
        step += 1
        writer.append([{"step": step, "loss": 1 / step, "writer": os.getpid()}])
        if step % 5 == 0:
            writer.append([{"step": step, "val_loss": 2 / step, "writer": os.getpid()}])
            writer.sync()
            Path("saving").write_text(str(step))
            os.replace("saving", saved)

draw = random.Random(0)
for _ in range(kills):
    pid = os.fork()
    if pid == 0:
        try:
            start()
        finally:
            os._exit(8)
    time.sleep(draw.uniform(0.001, 0.02))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
"""


def kill_again_and_again(folder, kills: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(kills)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = metrics.read(folder / "metrics.jsonl")
    steps = [row for row in found if "loss" in row]
    assert [row["step"] for row in steps] == [*range(1, len(steps) + 1)]
    assert len(steps) >= int((folder / "saved").read_text())
    assert [row["loss"] for row in steps] == [1 / row["step"] for row in steps]
    scores = [row["step"] for row in found if "val_loss" in row]
    assert scores == [*range(5, 5 * len(scores) + 1, 5)]
    # of a step that several starts wrote, the newest counts
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    newest = {}
    for line in lines[:-1]:
        row = json.loads(line)
        if "loss" in row:
            newest[row["step"]] = row["writer"]
    assert len(lines) - 1 > len(found), "no step was ever written twice"
    assert [row["writer"] for row in steps] == [newest[row["step"]] for row in steps]
    assert [row["start"] for row in steps] == sorted(row["start"] for row in steps)


def test_each_step_is_there_once_however_often_its_writer_was_killed(tmp_path):
    kill_again_and_again(tmp_path, kills=20)


@pytest.mark.slow
def test_each_step_is_there_once_after_three_hundred_kills(tmp_path):
    kill_again_and_again(tmp_path, kills=300)


def test_a_history_cut_at_any_byte_is_read_and_carried_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = metrics.Metrics(path, print)
    for step in (1, 2, 3):
        writer.append([{"step": step, "loss": 1 / step}])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        assert [row["step"] for row in metrics.read(path)] == [*range(1, complete + 1)]
        metrics.Metrics(path, print).append([{"step": complete + 1, "loss": 9.0}])
        assert [row["step"] for row in metrics.read(path)] == [*range(1, complete + 2)]
        assert metrics.read(path)[-1]["loss"] == 9.0
