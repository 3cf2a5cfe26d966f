"""A resumed run holds no more memory than one that was never stopped."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import checkpoint, entered, run

from fastbrain import cli
from fastbrain.lm import TransformerLm

# 6 million parameters: what a resume might not let go of, weights or moments, shows
OPTIONS = [
    "model.d_model=256", "model.n_layers=8", "model.n_heads=4", "model.head_dim=64",
    "model.d_ff=768", "train.global_batch_size=2", "train.micro_batch_size=2",
]  # fmt: skip

# a run that saved holds memory for its next save, so what is compared with must not have
RARE = ["eval.interval=6", "eval.samples=0"]

# the memory of the process at each step, before its update
PROGRAM = """
import json, sys, torch
from fastbrain import train
from fastbrain.lm import TransformerLm
torch.set_num_threads(1)
resident, accumulate = [], TransformerLm.accumulate_step
def measured(model, batch, **options):
    losses = accumulate(model, batch, **options)
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    resident.append([int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM")])
    return losses
TransformerLm.accumulate_step = measured
code = train.main(json.loads(sys.argv[1]))
print(json.dumps(resident))
sys.exit(code)
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


def tensor_bytes() -> int:
    """What all tensors that Python knows of hold together."""
    gc.collect()
    # not isinstance, which wakes whatever pretends to be of another class; other tests of this
    # process may have left tensors of their own kinds behind, without a storage
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in plain]
    storages = [
        each.untyped_storage()
        for each in tensors
        if each.layout == torch.strided and not each.is_meta
    ]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_tensors_that_a_resume_read_are_let_go_of(monkeypatch):
    held, calls, accumulate = [], [], TransformerLm.accumulate_step

    def measured(model, batch, **options):
        losses = accumulate(model, batch, **options)
        calls.append(None)
        if len(calls) in (4, 6, 7, 9):  # steps 4 and 6 of the lean run and of the resumed one
            held.append(tensor_bytes())
        return losses

    assert run("short", *RARE) == 0
    shutil.rmtree(checkpoint("short", 6))
    monkeypatch.setattr(TransformerLm, "accumulate_step", measured)
    assert run("lean", *RARE, "save.interval_steps=6") == 0
    assert cli.main(["resume", "short"]) == 0
    assert len(calls) == 9
    # a few bytes are of losses that were not fetched yet
    assert held[2] <= held[0] + 64
    assert held[3] <= held[1] + 64


def memory(name: str, *options: str) -> list[list[int]]:
    """Of a run in a process of its own: kB resident and at most, at each step."""
    arguments = json.dumps(["tiny.toml", "--run", name, "--json", *OPTIONS, *options])
    command = [sys.executable, "-c", PROGRAM, arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_resumed_process_is_no_larger_than_one_never_stopped():
    whole = memory("whole", *RARE, "save.interval_steps=6")
    memory("resumed", *RARE)
    shutil.rmtree(checkpoint("resumed", 6))
    resumed = memory("resumed", *RARE, "--resume", "auto")
    assert (len(whole), len(resumed)) == (6, 3)
    for before, after in zip(whole[3:], resumed, strict=True):
        assert after[0] <= 1.05 * before[0], (whole, resumed)
        assert after[1] <= 1.05 * before[1], (whole, resumed)
