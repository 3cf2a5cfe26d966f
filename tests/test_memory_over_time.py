"""A run takes as much memory, as many open files and as many threads late as early."""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from training_runs import entered, run

from fastbrain.lm import TransformerLm

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")

# as small as a model can be: it is the loop that might grow
SMALLEST = [
    "model.d_model=8", "model.n_layers=1", "model.n_heads=1", "model.n_kv_heads=1",
    "model.head_dim=8", "model.d_ff=8", "train.global_batch_size=1", "train.micro_batch_size=1",
    "eval.samples=0",
]  # fmt: skip

# kB resident, open files, and threads of the process, at these steps
PROGRAM = """
import gc, json, os, sys, torch
from fastbrain import train
from fastbrain.lm import TransformerLm
torch.set_num_threads(1)
arguments, steps = json.loads(sys.argv[1])
seen, count, accumulate = [], 0, TransformerLm.accumulate_step
def watched(model, batch, **options):
    global count
    count += 1
    if count in steps:
        gc.collect()
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        numbers = [int(lines[key].split()[0]) for key in ("VmRSS", "Threads")]
        seen.append([*numbers, len(os.listdir("/proc/self/fd"))])
    return accumulate(model, batch, **options)
TransformerLm.accumulate_step = watched
code = train.main(arguments)
print(json.dumps(seen))
sys.exit(code)
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


def watched(name: str, steps: list[int], *options: str) -> list[list[int]]:
    arguments = ["tiny.toml", "--run", name, "--json", *SMALLEST, *options]
    command = [sys.executable, "-c", PROGRAM, json.dumps([arguments, steps])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) == len(steps)
    return seen


def test_hundreds_of_steps_leave_no_tensor_file_or_thread_behind(monkeypatch):
    seen, accumulate = [], TransformerLm.accumulate_step

    def counted(model, batch, **options):
        seen.append(None)
        if len(seen) in (110, 310):  # both a few steps after a line and far from an evaluation
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            descriptors = len(os.listdir("/proc/self/fd"))
            seen[-1] = (len(tensors), descriptors, threading.active_count())
        return accumulate(model, batch, **options)

    monkeypatch.setattr(TransformerLm, "accumulate_step", counted)
    lengths = ["train.max_steps=320", "save.interval_steps=50", "eval.interval=50"]
    assert run("short", *SMALLEST, *lengths) == 0
    early, late = seen[109], seen[309]
    assert late[1:] == early[1:]
    # losses that were not fetched yet are a tensor or two a step
    assert late[0] <= early[0] + 60


@pytest.mark.slow
def test_twenty_thousand_steps_over_two_gigabytes_stay_flat():
    with Path("sparse.bin").open("wb") as file:
        file.truncate(2 << 30)
    lengths = ["train.max_steps=20000", "save.interval_steps=2000", "eval.interval=20000"]
    early, middle, late = watched(
        "long", [2_900, 10_900, 19_900], "data.train=sparse.bin", *lengths,
        "data.validation=corpus.bin",
    )  # fmt: skip
    Path("sparse.bin").unlink()
    assert early[1:] == middle[1:] == late[1:]
    assert late[0] <= middle[0] + 1024
    assert middle[0] <= early[0] + 1024
