"""What the training program will not do, and how it says so."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from training_runs import VOCAB, bits, checkpoint, entered, run

from fastbrain import cli
from fastbrain.tokens import TokenFile


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


def test_a_run_is_not_begun_twice(capsys):
    assert run("twice") == 0
    assert run("twice") == 2
    said = capsys.readouterr().err
    assert "there is a run at twice already: go on with it by adding --resume auto" in said
    before = Path("twice/metrics.jsonl").read_bytes()
    assert run("twice", "--resume", "auto") == 0, "a finished run has nothing to do"
    assert Path("twice/metrics.jsonl").read_bytes() == before
    assert run("twice", "--resume", "auto", "train.seed=1") == 2
    assert "train.seed was 42 and is now 1" in capsys.readouterr().err


def test_resume_auto_begins_where_there_is_nothing():
    assert run("fresh", "--resume", "auto") == 0
    assert checkpoint("fresh", 6).is_dir()


def test_another_model_or_file_under_a_checkpoint_is_refused(capsys):
    assert run("altered") == 0
    state = checkpoint("altered", 6) / "trainer_state.json"
    shutil.rmtree(checkpoint("altered", 6))
    for was, now, named in (
        ("d_ff = 48", "d_ff = 40", "model.d_ff was 48 and is now 40"),
        ("seed = 42", "seed = 43", "train.seed was 42 and is now 43"),
    ):
        config = Path("altered/config.toml")
        before = config.read_text()
        config.write_text(before.replace(was, now))
        assert cli.main(["resume", "altered"]) == 2
        assert named in capsys.readouterr().err
        config.write_text(before)
    other = np.zeros(2_000, np.uint32)
    Path("other.bin").write_bytes(other.tobytes())
    corpus = Path("altered/data/corpus.json")
    corpus.write_text(
        corpus.read_text().replace(str(Path("corpus.bin").absolute()), "../../other.bin")
    )
    assert cli.main(["resume", "altered"]) == 2
    assert "is not the file that this run began with" in capsys.readouterr().err
    assert not state.exists()


def test_damage_falls_back_and_nothing_intact_is_exit_3(capsys):
    assert run("damaged") == 0
    whole = bits("damaged", 6)
    os.truncate(checkpoint("damaged", 6) / "model.safetensors", 100)
    assert cli.main(["resume", "damaged"]) == 0
    assert "model.safetensors has 100 bytes and should have" in capsys.readouterr().out
    assert bits("damaged", 6) == whole
    for step in (3, 6):
        os.truncate(checkpoint("damaged", step) / "model.safetensors", 100)
    assert cli.main(["resume", "damaged"]) == 3
    assert "damaged has no intact checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("position", [0, 1_000, 1_999])
def test_an_id_outside_the_vocabulary_is_refused_before_the_first_step(capsys, position):
    ids = np.fromfile("corpus.bin", np.uint32)
    ids[position] = VOCAB
    TokenFile.write("poked.bin", ids)
    assert run(f"poked-{position}", "data.train=poked.bin") == 2
    assert "token id 61 is outside the vocabulary of 61" in capsys.readouterr().err
    assert not Path(f"poked-{position}/config.toml").exists()


REFUSED_FILES = {
    "empty.bin": (b"", "empty"),
    "odd.bin": (bytes(5), "5 bytes"),
    "short.bin": (bytes(4 * 20), "fewer than one window of data.seq_len 16"),
    "text.bin": (b"this is plain text. " * 50, "text"),
    "blank.txt": (b" \n", "no text"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": 1}\n', "line 2"),
    "what.csv": (b"a,b\n", "what.csv"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_a_file_that_cannot_be_trained_on_is_refused_in_prose(capsys, name):
    content, named = REFUSED_FILES[name]
    Path(name).write_bytes(content)
    vocabulary = [] if name.endswith(".bin") else ["model.vocab_size=none"]
    assert run(f"run-{name}", f"data.train={name}", *vocabulary) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_a_token_file_must_come_with_its_vocabulary(capsys):
    assert run("unknown", "model.vocab_size=none") == 2
    assert "give data.tokenizer" in capsys.readouterr().err


def test_a_model_too_large_for_the_machine_is_refused_before_it_is_made(capsys):
    assert run("huge", "model.d_ff=2000000000") == 2
    assert (
        "GB for weights, gradients and moments and their copy for saving; this"
        in capsys.readouterr().err
    )
