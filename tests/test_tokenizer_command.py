"""`fastbrain tokenizer`: trained, shown, and used in both directions."""

import io
import json
import sys
from pathlib import Path

import pytest
from help_examples import examples
from made_runs import command
from texts import TOPICS, small_tokenizer

from fastbrain.cli import main
from fastbrain.commands import tokenizer
from fastbrain.tokens.chat_template import CHATML
from fastbrain.tokens.tokenizer import load_tokenizer, tokenizer_sha256, train_tokenizer
from fastbrain.tokens.tokenizer_files import TokenizerFiles

TEXT = "An \u00e9t\u00e9 <|im_end|> \u4e2d \U0001f600"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(small_tokenizer().to_str())
    Path("corpus.txt").write_text("".join(TOPICS[:3]))


def printed(capsys, *arguments: object) -> dict:
    assert command(tokenizer, *arguments, "--json") == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_a_trained_one_is_that_of_the_text_with_its_template(capsys):
    for out, folder in (("made.json", "."), ("made", "made"), ("new/t.json", "new")):
        found = printed(capsys, "train", "corpus.txt", out, "--vocab-size", 500)
        expected = train_tokenizer(["".join(TOPICS[:3])], 500)
        assert found["sha256"] == tokenizer_sha256(expected)
        assert found["size"] == 500
        assert found["special_tokens"] == {
            "<|endoftext|>": 0, "<|pad|>": 1, "<|im_start|>": 2, "<|im_end|>": 3,
        }  # fmt: skip
        files = TokenizerFiles.read(out)
        assert (files.eos, files.pad, files.chat_template) == ("<|endoftext|>", "<|pad|>", CHATML)
        config = json.loads(Path(folder, "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "model_max_length" not in config
        Path(folder, "tokenizer_config.json").unlink()
    assert sorted(path.name for path in Path("new").iterdir()) == ["t.json"]


def test_one_that_is_there_is_replaced_only_by_force(capsys):
    before = Path("small.json").read_bytes()
    assert command(tokenizer, "train", "corpus.txt", "small.json") == 2
    assert "small.json exists" in capsys.readouterr().err
    assert Path("small.json").read_bytes() == before
    arguments = ("train", "corpus.txt", "small.json", "--vocab-size", 400, "--force")
    assert printed(capsys, *arguments)["size"] == 400
    assert load_tokenizer("small.json").get_vocab_size() == 400
    # the configuration beside it belongs to another one
    Path("small.json").unlink()
    assert command(tokenizer, "train", "corpus.txt", "small.json") == 2
    assert "tokenizer_config.json exists" in capsys.readouterr().err


def test_a_text_with_too_few_words_is_said_to_have_them(capsys):
    Path("corpus.txt").write_text("abc")
    assert command(tokenizer, "train", "corpus.txt", "t.json") == 0
    assert "the text has no more than 26" in capsys.readouterr().err


def test_what_is_shown(capsys):
    found = printed(capsys, "show", "small.json")
    assert found["path"] == "small.json"
    assert (found["size"], found["model"], found["pre_tokenizer"]) == (600, "BPE", "ByteLevel")
    assert (found["eos"], found["pad"], found["bos"]) == ("<|endoftext|>", "<|pad|>", None)
    assert (found["ends"], found["chat_template"]) == ([0], False)
    assert found["sha256"] == tokenizer_sha256(small_tokenizer())
    assert command(tokenizer, "show", "small.json") == 0
    lines = capsys.readouterr().out
    assert "0 <|endoftext|>, 1 <|pad|>, 2 <|im_start|>, 3 <|im_end|>" in lines
    assert "none; ChatML is used" in lines
    Path("run/data").mkdir(parents=True)
    Path("small.json").rename("run/data/tokenizer.json")
    assert printed(capsys, "show", "run")["path"] == "run/data/tokenizer.json"


def test_one_that_ends_no_text_is_shown_all_the_same(capsys):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 5}, "a")).save("words.json")
    found = printed(capsys, "show", "words.json")
    assert (found["size"], found["eos"], found["pre_tokenizer"]) == (6, None, None)


def test_text_becomes_ids_and_comes_back(capsys, monkeypatch):
    found = printed(capsys, "encode", "small.json", TEXT)
    assert found["count"] == len(found["ids"]) == len(found["tokens"])
    assert 3 not in found["ids"]
    assert printed(capsys, "decode", "small.json", str(found["ids"])[1:-1])["text"] == TEXT
    assert command(tokenizer, "encode", "small.json", TEXT) == 0
    line = capsys.readouterr().out
    assert line == ",".join(map(str, found["ids"])) + "\n"
    for verb, data in (("encode", TEXT.encode()), ("decode", line.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert command(tokenizer, verb, "small.json", "-") == 0
        assert capsys.readouterr().out == {"encode": line, "decode": TEXT + "\n"}[verb]


def test_special_tokens_are_read_and_shown_when_asked_for(capsys):
    assert 3 in printed(capsys, "encode", "small.json", TEXT, "--special")["ids"]
    assert printed(capsys, "decode", "small.json", "2,3")["text"] == "<|im_start|><|im_end|>"


def test_padding_and_truncation_in_the_file_do_not_apply(capsys):
    padded = load_tokenizer("small.json")
    padded.enable_truncation(2)
    padded.enable_padding(length=9)
    padded.save("padded.json")
    plain = printed(capsys, "encode", "small.json", "some words")
    assert printed(capsys, "encode", "padded.json", "some words") == plain


REFUSED = {
    "no file": (["show", "none.json"], "cannot read none.json"),
    "no tokenizer": (["show", "corpus.txt"], "is not a tokenizer"),
    "out of range": (["decode", "small.json", "1,600"], "token id 600 is outside the vocabulary"),
    "no ids": (["decode", "small.json", "a"], "'a' is no id"),
    "none at all": (["decode", "small.json", " "], "IDS is empty"),
    "not UTF-8": (["encode", "small.json", "caf\udce9"], "there is a byte 0xe9 at 3"),
    "too small": (["train", "corpus.txt", "t.json", "--vocab-size", "9"], "vocab_size is 9"),
    "no text": (["train", "none.txt", "t.json"], "cannot read none.txt"),
    "empty": (["train", "empty.txt", "t.json"], "there is no text to train"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_a_line(case, capsys):
    Path("empty.txt").touch()
    arguments, message = REFUSED[case]
    assert command(tokenizer, *arguments) == 2
    done = capsys.readouterr()
    assert message in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert not list(Path().glob("*t.json*"))


def test_the_command_line_knows_its_verbs(capsys):
    assert main(["tokenizer", "encode", "small.json", "ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 2
    with pytest.raises(SystemExit, match="2"):
        main(["tokenizer"])


def test_the_examples_work(capsys):
    for words in examples(tokenizer):
        assert command(tokenizer, *words) == 0, capsys.readouterr().err
