"""`fastbrain eval`: sums that a loop over the text confirms, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from help_examples import examples
from made_runs import command, made
from small_models import CONTEXT, saved, small_model
from texts import TOPICS, ids_of, small_tokenizer

from fastbrain.commands import eval as eval_command
from fastbrain.tokens import TokenFile
from fastbrain.tokens.prepare import prepare
from fastbrain.training.pretrained import Pretrained

TEXT = TOPICS[3][:900] + " \u00e9t\u00e9 \u4e2d\u6587"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Temporary files go to a directory that has to be empty in the end."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    yield
    assert list(place.iterdir()) == []


def found(capsys, *arguments: object) -> dict:
    assert command(eval_command, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def nats(ids: list[int], context: int = CONTEXT) -> torch.Tensor:
    """What each id but the first costs after those before it, in FP64."""
    logits = small_model(context).module(torch.tensor([ids]))[0].double()
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return -picked[:, 0].detach()


def test_windows_side_by_side_are_a_sum_over_their_tokens(model, text, capsys):
    ids = ids_of(small_tokenizer(), TEXT)
    windows = [ids[at : at + 20] for at in range(0, len(ids) - 19, 20)]
    costs = torch.cat([nats(window) for window in windows])
    for batch in (1, 3):
        answer = found(capsys, model, text, "--seq-len", 20, "--batch", batch)
        assert answer["loss"] == pytest.approx(float(costs.mean()), rel=1e-5)
        assert answer["tokens_scored"] == len(costs)
        assert answer["perplexity"] == pytest.approx(math.exp(answer["loss"]))
        bits = answer["loss"] / math.log(2) * len(ids) / len(TEXT.encode())
        assert answer["bits_per_byte"] == pytest.approx(bits)
        assert (answer["tokens"], answer["text_bytes"]) == (len(ids), len(TEXT.encode()))


@pytest.mark.parametrize("length", [2, 19, 20, 21, 39, 40, 57])
def test_every_token_is_predicted_once(model, tmp_path, length, capsys):
    ids = ids_of(small_tokenizer(), TEXT)[:length]
    TokenFile.write(tmp_path / "t.bin", ids)
    windows = [ids[at : at + 20] for at in range(0, length - 1, 19)]
    costs = torch.cat([nats(window) for window in windows])
    assert len(costs) == length - 1
    for batch in (1, 2):
        answer = found(
            capsys, model, tmp_path / "t.bin", "--every-token", "--seq-len", 20, "--batch", batch
        )
        assert answer["tokens_scored"] == length - 1
        assert answer["loss"] == pytest.approx(float(costs.mean()), rel=1e-5)


def test_a_short_text_is_one_window_and_its_bits_are_exact(model, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("A few words: \u00e9t\u00e9.")
    ids = ids_of(small_tokenizer(), "A few words: \u00e9t\u00e9.")
    assert len(ids) < CONTEXT
    answer = found(capsys, model, tmp_path / "short.txt", "--every-token")
    costs = nats(ids)
    assert answer["seq_len"] == len(ids)
    assert answer["loss"] == pytest.approx(float(costs.mean()), rel=1e-5)
    size = len("A few words: \u00e9t\u00e9.".encode())
    assert answer["bits_per_byte"] == pytest.approx(
        float(costs.sum()) / math.log(2) / size, rel=1e-5
    )
    assert found(capsys, model, tmp_path / "short.txt")["loss"] == pytest.approx(answer["loss"])


def test_text_and_its_token_file_have_one_score(model, text, tmp_path, capsys):
    prepare(text, tmp_path / "text.bin", small_tokenizer())
    lines = tmp_path / "text.jsonl"
    lines.write_text(json.dumps({"body": TEXT}) + "\n")
    same = [
        found(capsys, model, text),
        found(capsys, model, tmp_path / "text.bin"),
        found(capsys, model, lines, "--field", "body"),
    ]
    (tmp_path / "text.bin.json").unlink()
    same.append(found(capsys, model, tmp_path / "text.bin"))
    for answer in same:
        assert [answer[k] for k in ("loss", "bits_per_byte", "tokens", "text_bytes")] == [
            same[0][k] for k in ("loss", "bits_per_byte", "tokens", "text_bytes")
        ]


def test_the_first_tokens_of_a_file(model, text, capsys):
    ids = ids_of(small_tokenizer(), TEXT)[:50]
    answer = found(capsys, model, text, "--max-tokens", 50, "--every-token", "--seq-len", 48)
    assert (answer["tokens"], answer["tokens_scored"]) == (50, 49)
    costs = torch.cat([nats(ids[:48]), nats(ids[47:])])
    assert answer["loss"] == pytest.approx(float(costs.mean()), rel=1e-5)
    assert answer["text_bytes"] == len(small_tokenizer().decode(ids).encode())


def test_a_run_is_scored_at_the_length_that_it_learned_with(tmp_path, monkeypatch, capsys):
    run = made(tmp_path / "run")
    opened = Pretrained(small_model(), None, "checkpoint", Path("x"))
    monkeypatch.setattr("fastbrain.training.pretrained.open_pretrained", lambda *_: opened)
    TokenFile.write(tmp_path / "t.bin", np.arange(300) % 280)
    assert found(capsys, run.path, tmp_path / "t.bin")["seq_len"] == 16
    checkpoint = run.path / "checkpoints" / "step-00000006"
    for config, seq_len in (({"data": {"seq_len": 24}}, 24), ({}, CONTEXT)):
        (checkpoint / "trainer_state.json").write_text(json.dumps({"config": config}))
        assert found(capsys, checkpoint, tmp_path / "t.bin")["seq_len"] == seq_len


def test_numbers_that_are_none_are_valid_json(model, text, monkeypatch, capsys):
    from fastbrain.commands import eval_windows

    wild = eval_windows.Scored(math.nan, 3)
    monkeypatch.setattr(eval_windows, "scored", lambda *_: wild)
    answer = found(capsys, model, text)
    assert (answer["loss"], answer["perplexity"]) == (None, None)
    assert eval_windows.Scored(1e6, 3).perplexity() == math.inf


def test_the_text_says_it_all(model, text, capsys):
    assert command(eval_command, model, text, "--seq-len", 20) == 0
    labels = [line[:15].strip() for line in capsys.readouterr().out.splitlines()]
    assert labels == [
        "model", "data", "loss", "perplexity", "bits per byte", "tokens scored", "seconds",
    ]  # fmt: skip


def other_tokens(folder: Path) -> Path:
    from fastbrain.tokens.tokenizer import train_tokenizer

    (folder / "x.txt").write_text(TEXT)
    prepare(folder / "x.txt", folder / "other.bin", train_tokenizer([TEXT], 300))
    return folder / "other.bin"


def ids(folder: Path, *values: int) -> Path:
    TokenFile.write(folder / "ids.bin", values)
    return folder / "ids.bin"


REFUSED = {
    "nothing there": (lambda folder: folder / "none.txt", [], "No such file"),
    "empty": (lambda folder: Path((folder / "e.txt").touch() or folder / "e.txt"), [], "no text"),
    "no ids": (lambda folder: Path((folder / "e.bin").touch() or folder / "e.bin"), [], "is empty"),
    "one id": (lambda folder: ids(folder, 5), ["--every-token"], "has one token, and none after"),
    "large id": (lambda folder: ids(folder, 5, 600), [], "token id 600 is outside"),
    "other tokenizer": (other_tokens, [], "was made by the tokenizer"),
    "window": (lambda folder: ids(folder, 5, 6), ["--seq-len", "1"], "--seq-len is 1"),
    "long window": (lambda folder: ids(folder, 5, 6), ["--seq-len", "49"], "max_seq_len of 48"),
    "too few": (lambda folder: ids(folder, 5, 6), ["--seq-len", "9"], "do not fill one window"),
    "not text": (lambda folder: Path(__file__), [], "it must be a .txt"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_a_line(case, model, tmp_path, capsys):
    make, arguments, message = REFUSED[case]
    assert command(eval_command, model, make(tmp_path), *arguments) == 2
    done = capsys.readouterr()
    assert message in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)


def test_text_needs_a_tokenizer(tmp_path, text, capsys):
    small_model().save_bin(tmp_path / "m.rbw")
    assert command(eval_command, tmp_path / "m.rbw", text) == 2
    assert "the model has no tokenizer beside it" in capsys.readouterr().err
    (tmp_path / "t.json").write_text(small_tokenizer().to_str())
    named = ("--tokenizer", tmp_path / "t.json")
    assert found(capsys, tmp_path / "m.rbw", text, *named)["tokens_scored"] > 0


def test_the_examples_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(TEXT)
    prepare("corpus.txt", "train.bin", small_tokenizer())
    places = {"runs/first/data/train.bin": "train.bin", "runs/first": str(model), "128": "32"}
    for words in examples(eval_command, places):
        assert command(eval_command, *words) == 0, capsys.readouterr().err
