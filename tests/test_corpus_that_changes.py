"""A token file that is cut, grown or replaced under a running training: told, and nothing lost."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from training_runs import VOCAB, bits, entered, run

from fastbrain import cli
from fastbrain.lm import TransformerLm
from fastbrain.tokens import TokenFile
from fastbrain.training.run_dir import RunDir


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        shutil.copy("corpus.bin", "whole.bin")
        assert run("untouched") == 0
        yield folder


def cut(path: Path) -> None:
    os.truncate(path, 4 * 30)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(400))


def replace(path: Path) -> None:
    TokenFile.write(path, np.random.default_rng(9).integers(0, VOCAB, 2_000))


@pytest.mark.parametrize(
    ("change", "told"),
    [(cut, "now has 120"), (grow, "now has 8400"), (replace, "replaced")],
    ids=["cut", "grown", "replaced"],
)
def test_a_run_ends_with_the_byte_and_goes_on_once_the_file_is_back(
    monkeypatch, capsys, change, told
):
    name = f"run-{change.__name__}"
    accumulate, calls = TransformerLm.accumulate_step, iter(range(100))

    def changing(model, batch, **options):
        if next(calls) == 4:  # the fifth step, one behind a checkpoint
            change(Path("corpus.bin"))
        return accumulate(model, batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TransformerLm, "accumulate_step", changing)
        assert run(name) == 1
    said = capsys.readouterr().err
    assert "corpus.bin changed" in said
    assert "at byte" in said
    assert told in said
    assert f"fastbrain resume {name}" in said
    assert "Traceback" not in said
    assert RunDir.open(Path(name)).newest(print).step >= 3
    assert cli.main(["resume", name]) == 2, "the file is another one still"
    assert "is not the file that this run began with" in capsys.readouterr().err
    shutil.copy("whole.bin", "corpus.bin")
    assert cli.main(["resume", name]) == 0
    assert bits(name, 6) == bits("untouched", 6)
