"""Tokens mean what one tokenizer says: another one in its place is refused with both digests."""

import json
import shutil
from pathlib import Path

import pytest
from texts import TOPICS
from training_runs import checkpoint, entered, run

from fastbrain import cli
from fastbrain.tokens.prepare import prepare
from fastbrain.tokens.tokenizer import tokenizer_sha256, train_tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return [train_tokenizer(TOPICS[i : i + 10], 400) for i in (0, 10)]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory, tokenizers):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        Path("text.txt").write_text("\n".join(TOPICS[:20])[:60_000])
        for name, tokenizer in zip(("first", "second"), tokenizers, strict=True):
            tokenizer.save(f"{name}.json")
        yield folder


OPTIONS = ["data.train=text.txt", "model.vocab_size=none", "eval.samples=0", "train.max_steps=2"]


def assert_both_named(said: str, tokenizers) -> None:
    for each in tokenizers:
        assert tokenizer_sha256(each) in said
    assert "Traceback" not in said


def test_a_run_does_not_go_on_with_another_tokenizer(tokenizers, capsys):
    assert run("swapped", *OPTIONS, "data.tokenizer=first.json") == 0
    shutil.rmtree(checkpoint("swapped", 2))
    capsys.readouterr()
    kept = Path("swapped/data/tokenizer.json").read_bytes()
    shutil.copy("second.json", "swapped/data/tokenizer.json")
    assert cli.main(["resume", "swapped"]) == 2
    assert_both_named(capsys.readouterr().err, tokenizers)
    Path("swapped/data/tokenizer.json").write_bytes(kept)
    assert cli.main(["resume", "swapped"]) == 0


def test_a_run_does_not_begin_with_the_tokens_of_another_tokenizer(tokenizers, capsys):
    prepare("text.txt", "tokens.bin", tokenizers[0])
    files = ["data.train=tokens.bin", "data.tokenizer=second.json"]
    assert run("mixed", *OPTIONS, *files) == 2
    assert_both_named(capsys.readouterr().err, tokenizers)
    assert not Path("mixed/config.toml").exists()


def test_a_run_remembers_which_tokenizer_it_has(tokenizers):
    assert run("noted", *OPTIONS, "data.tokenizer=first.json") == 0
    state = (checkpoint("noted", 2) / "trainer_state.json").read_text()
    assert tokenizer_sha256(tokenizers[0]) in json.dumps(json.loads(state))
