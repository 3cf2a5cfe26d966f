"""A run that reads the first and the last tokens of its file goes on exactly where it stopped.

Rows are drawn from the step number, so nothing special happens at an edge, and there is nothing
that reads ahead, so nothing is lost with a process.
"""

import shutil

import numpy as np
import pytest
from training_runs import VOCAB, bits, checkpoint, entered, numbers, run

from fastbrain import cli
from fastbrain.tokens import TokenFile

SEQ_LEN, ROWS = 16, 8


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        ids = np.random.default_rng(1).integers(0, VOCAB, SEQ_LEN + 1)
        TokenFile.write(folder / "held.bin", ids)
        for tokens in (SEQ_LEN, SEQ_LEN + 1):
            TokenFile.write(folder / f"{tokens}.bin", ids[:tokens])
        yield folder


@pytest.mark.parametrize("tokens", [SEQ_LEN, SEQ_LEN + 1])
def test_a_run_over_the_edges_of_its_file_resumes_to_the_same_bits(tokens):
    with TokenFile.open(f"{tokens}.bin", 42) as file:
        for step in (2, 3):  # the last before the checkpoint, the first after it
            drawn = file.offsets(step, ROWS, SEQ_LEN).tolist()
            assert {*drawn} == {*range(tokens - SEQ_LEN + 1)}, "an edge was not read"
    name, again = f"edges-{tokens}", f"edges-{tokens}-resumed"
    files = [f"data.train={tokens}.bin", "data.validation=held.bin"]
    assert run(name, *files, "eval.samples=0") == 0
    shutil.copytree(name, again)
    shutil.rmtree(checkpoint(again, 6))
    assert cli.main(["resume", again]) == 0
    assert bits(again, 6) == bits(name, 6)
    assert numbers(again) == numbers(name)


def test_a_reopened_file_gives_the_rows_that_were_next():
    with TokenFile.open("corpus.bin", 7) as file:
        rows = [file.batch(step, 4, SEQ_LEN).ids for step in range(60)]
    for step in (0, 1, 30, 59):
        with TokenFile.open("corpus.bin", 7) as file:
            for later in range(step, 60):
                assert file.batch(later, 4, SEQ_LEN).ids.equal(rows[later])
