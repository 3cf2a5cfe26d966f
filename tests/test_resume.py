"""2N steps are N steps, a new process, and N steps: every bit of weights, moments and losses."""

import json
import subprocess
import sys

import pytest
import resume_legs
import torch
from models import random_ids

from fastbrain import TokenFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume")
    TokenFile.write(path / "corpus.bin", random_ids(4000).numpy())
    return path


@pytest.fixture(scope="module")
def legs(folder):
    """Per case, the rows of the whole run, of its first half, and of the half resumed elsewhere."""
    whole, first = {}, {}
    for name in resume_legs.CASES:
        whole[name] = resume_legs.leg(name, folder, range(8), load=None, save="whole")
        first[name] = resume_legs.leg(name, folder, range(4), load=None, save="half")
    threads = torch.get_num_threads()
    command = [sys.executable, resume_legs.__file__, str(folder), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return whole, first, json.loads(done.stdout)


@pytest.mark.parametrize("name", resume_legs.CASES)
def test_a_resumed_run_is_the_run_never_stopped(name, folder, legs):
    whole, first, resumed = (rows[name] for rows in legs)
    assert first + resumed == whole
    assert len({json.dumps(row) for row in whole}) == 8  # no step stood still
    for suffix in (".rbw", ".opt"):
        end = (folder / f"{name}-whole{suffix}").read_bytes()
        assert (folder / f"{name}-resumed{suffix}").read_bytes() == end
