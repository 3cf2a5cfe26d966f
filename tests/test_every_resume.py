"""N steps, a new process and N steps are 2N steps, for every N to 20: the full count of a resume.

What test_resume.py and test_train.py do in the middle of a short run, at every place.
"""

import json
import shutil
import subprocess
import sys
import warnings

import pytest
import resume_legs
import torch
from models import random_ids
from training_runs import bits, checkpoint, entered, numbers, run

from fastbrain import TokenFile

pytestmark = pytest.mark.slow

EVERY = range(1, 21)
PROGRAM = {
    f"{shape}-{precision}-{split}": [moe, f"train.precision={precision}", micro]
    for shape, moe in (("dense", "model.moe_layers=[]"), ("moe", "model.moe_layers=[1]"))
    for precision in ("f32", "bf16-mixed")
    for split, micro in (("1", "train.micro_batch_size=8"), ("4", "train.micro_batch_size=2"))
}


def child(script: str, *arguments: object) -> str:
    """What a new process prints; it computes on one thread, as the tests do."""
    preamble = "import sys, torch\ntorch.set_num_threads(1)\n"
    command = [sys.executable, "-W", "ignore", "-c", preamble + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


RESUME_LEGS = """
import json
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from resume_legs import leg
torch.use_deterministic_algorithms(True)
rows = [
    leg(sys.argv[3], Path(sys.argv[2]), range(n, 2 * n), load=f"half-{n}", save=f"resumed-{n}")
    for n in range(1, 21)
]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("name", resume_legs.CASES)
def test_the_low_level_loop_resumes_after_every_step(name, tmp_path):
    assert torch.get_num_threads() == 1
    TokenFile.write(tmp_path / "corpus.bin", random_ids(4000).numpy())
    whole = []
    for n in EVERY:
        whole.append(resume_legs.leg(name, tmp_path, range(2 * n), None, f"whole-{n}"))
        resume_legs.leg(name, tmp_path, range(n), None, f"half-{n}")
    tests = resume_legs.__file__.rpartition("resume_legs")[0]
    resumed = json.loads(child(RESUME_LEGS, tests, tmp_path, name))
    for n, rows, again in zip(EVERY, whole, resumed, strict=True):
        assert again == rows[n:], f"after {n} steps"
        for suffix in (".rbw", ".opt"):
            end = (tmp_path / f"{name}-whole-{n}{suffix}").read_bytes()
            found = (tmp_path / f"{name}-resumed-{n}{suffix}").read_bytes()
            assert found == end, f"after {n} steps: {suffix}"


RESUME_RUNS = """
from fastbrain.cli import main
for n in range(1, 21):
    assert main(["resume", f"{sys.argv[1]}-{n}-resumed"]) == 0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


@pytest.mark.parametrize("case", PROGRAM)
def test_the_training_program_resumes_after_every_step(home, case):
    with warnings.catch_warnings():
        # BF16 is slow on some CPUs, which is said once
        warnings.simplefilter("ignore")
        for n in EVERY:
            whole, again = f"{case}-{n}", f"{case}-{n}-resumed"
            lengths = [f"train.max_steps={2 * n}", f"save.interval_steps={n}", "save.keep=40"]
            assert run(whole, *PROGRAM[case], *lengths, "eval.interval=7", "eval.samples=0") == 0
            shutil.copytree(whole, again)
            for step in range(n + 1, 2 * n + 1):  # the end, and the best of the second half
                shutil.rmtree(checkpoint(again, step), ignore_errors=True)
    child(RESUME_RUNS, case)
    for n in EVERY:
        whole, again = f"{case}-{n}", f"{case}-{n}-resumed"
        assert bits(again, 2 * n) == bits(whole, 2 * n), f"after {n} steps"
        assert numbers(again) == numbers(whole), f"after {n} steps"
