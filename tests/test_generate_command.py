"""`fastbrain generate`: whole characters as they come, JSON for scripts, refusals in a line."""

import io
import json
import sys
from pathlib import Path

import pytest
from help_examples import examples
from made_runs import command
from small_models import CONTEXT, saved, small_model
from texts import ids_of, small_tokenizer

from fastbrain import Sampler
from fastbrain.commands import generate
from fastbrain.commands.generate_text import Answer, Stops, TextStream, harmless, write

TEXT = "\u00c9t\u00e9: \u4e2d\u6587 \U0001f600!"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), ends=(7,))


def documents(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def decoded(ids: list[int]) -> str:
    return small_tokenizer().decode(ids, skip_special_tokens=False)


# ids into text


def test_a_character_of_several_tokens_comes_once_and_whole():
    ids = small_tokenizer().encode(TEXT).ids
    assert len(ids) > len(TEXT)
    stream = TextStream(small_tokenizer())
    pieces = [stream.push(id) for id in ids]
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.end() == TEXT


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_give_the_text_of_all_of_them(seed):
    # most are single bytes: invalid UTF-8 of every kind
    ids = Sampler.temperature(1.0, seed)._rng.integers(60, 299).tolist()
    stream = TextStream(small_tokenizer())
    assert "".join(stream.push(id) for id in ids) + stream.end() == decoded(ids)


def test_half_a_character_at_the_end_is_shown_at_the_end():
    ids = small_tokenizer().encode("a\U0001f600").ids[:-1]
    stream = TextStream(small_tokenizer())
    assert [stream.push(id) for id in ids] == ["a", "", "", ""][: len(ids)]
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


def test_a_leading_space_is_kept_after_a_prompt():
    from tokenizers import Tokenizer, decoders, models

    pieces = {"\u2581Hello": 0, "\u2581world": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(pieces, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    stream = TextStream(tokenizer, [0])
    assert stream.push(1) == " world"
    assert TextStream(tokenizer).push(1) == "world"


def test_a_prompt_that_ends_within_a_character_holds_nothing_up():
    *begun, last = small_tokenizer().encode("\U0001f600").ids
    stream = TextStream(small_tokenizer(), begun)
    assert [stream.push(last), *map(stream.push, ids_of(small_tokenizer(), "ab")[:-1])][-1] == "b"


def test_text_that_may_become_a_stop_is_held_back():
    tokenizer = small_tokenizer()
    answer = Answer(tokenizer, [], Stops(frozenset(), ("END", "NEVER")))
    shown = []
    for id in tokenizer.encode("one EN two END three").ids:
        shown.append(answer.push(id))
        assert not any("END" in "".join(shown[:i]) for i in range(len(shown) + 1))
        if answer.stopped:
            break
    assert "".join(shown) == answer.text == "one EN two "
    assert (answer.finish_reason, answer.end()) == ("stop", "")


def test_what_only_looked_like_a_stop_is_shown_at_the_end():
    answer = Answer(small_tokenizer(), [], Stops(frozenset(), ("END",)))
    shown = "".join(answer.push(id) for id in small_tokenizer().encode("EN").ids)
    assert (shown, answer.end(), answer.finish_reason) == ("", "EN", "length")


def test_an_id_that_ends_is_counted_and_not_shown():
    answer = Answer(small_tokenizer(), [], Stops(frozenset([7])))
    ids = [*small_tokenizer().encode("ab").ids, 7]
    assert "".join(map(answer.push, ids)) == "ab"
    assert (answer.ids, answer.text, answer.finish_reason) == (ids, "ab", "stop")


def test_a_terminal_is_not_given_what_it_would_obey():
    text = "a\tb\n\x1b[2J\x9b1m\r\x07\x7f\u00e9"
    assert harmless(text) == "a\tb\n\\x1b[2J\\x9b1m\\r\\x07\\x7f\u00e9"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, "a\\x1b[2J"), (io.StringIO, "a\x1b[2J")])
def test_what_is_written_is_spelled_out_for_a_terminal_alone(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stdout", stream())
    write("a\x1b[2J")
    assert sys.stdout.getvalue() == shown


# the verb


def test_the_stream_and_the_json_are_the_same_answer(model, capsys):
    arguments = (model, "--prompt", "Once", "-n", 30, "--seed", 5, "--temperature", 2)
    assert command(generate, *arguments) == 0
    shown = capsys.readouterr().out
    assert command(generate, *arguments, "--json") == 0
    (found,) = documents(capsys.readouterr().out)
    prompt = ids_of(small_tokenizer(), "Once")[:-1]
    sampler = Sampler.temperature(2, 5)
    expected = small_model().generate(prompt, 30, sampler, stop=(0, 7))
    assert found["ids"] == expected
    assert found["text"] == decoded(expected)
    assert shown == found["text"] + "\n"
    assert (found["prompt"], found["tokens"], found["finish_reason"]) == ("Once", 30, "length")
    assert found["tokens_per_s"] > 0


def test_several_prompts_are_answered_as_one_by_one(model, capsys):
    texts = ["Once", "a much longer prompt than the other", "x"]
    arguments = [each for text in texts for each in ("--prompt", text)]
    common = ("--greedy", "-n", 9, "--json")
    assert command(generate, model, *arguments, "--batch", 2, *common) == 0
    together = documents(capsys.readouterr().out)
    for text, found in zip(texts, together, strict=True):
        assert command(generate, model, "--prompt", text, *common) == 0
        (alone,) = documents(capsys.readouterr().out)
        assert (alone["prompt"], alone["ids"], alone["text"]) == (
            found["prompt"], found["ids"], found["text"],
        )  # fmt: skip
    assert command(generate, model, *arguments, "--greedy", "-n", 9) == 0
    blocks = capsys.readouterr().out.split("\n---\n\n")
    assert blocks == [f"[{each['prompt']}]{each['text']}\n" for each in together]


def test_prompts_come_from_files_and_standard_input(model, tmp_path, capsys, monkeypatch):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_bytes(b"\xef\xbb\xbfone\r\n\ntw\xc3\xb6\rmore")
    lines.write_text('{"prompt": "three", "other": 1}\n\n{"prompt": "four"}\n')
    found = []
    for name in (plain, lines):
        assert command(generate, model, "--prompts", name, "-n", 1, "--json") == 0
        found += [each["prompt"] for each in documents(capsys.readouterr().out)]
    assert found == ["one", "tw\u00f6\rmore", "three", "four"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"five\n")))
    assert command(generate, model, "--prompts", "-", "-n", 1, "--json") == 0
    assert documents(capsys.readouterr().out)[0]["prompt"] == "five"


def test_an_answer_ends_where_the_files_and_the_options_say(model, capsys):
    prompt = ("--prompt", "Once", "--temperature", 3, "--seed", 2, "-n", 40, "--json")
    assert command(generate, model, *prompt, "--ignore-eos") == 0
    (free,) = documents(capsys.readouterr().out)
    stop = free["ids"][9]
    first = free["ids"].index(stop)
    assert command(generate, model, *prompt, "--stop", stop) == 0
    (cut,) = documents(capsys.readouterr().out)
    assert cut["ids"] == free["ids"][: first + 1]
    assert (cut["finish_reason"], cut["text"]) == ("stop", decoded(free["ids"][:first]))
    ended = saved(model.parent, ends=(stop,))  # in generation_config.json
    for more, expected in (((), cut), (("--ignore-eos",), free)):
        assert command(generate, ended, *prompt, *more) == 0
        assert documents(capsys.readouterr().out)[0]["ids"] == expected["ids"]
    saved(model.parent, ends=(7,))


def test_a_text_can_be_the_stop(model, capsys):
    prompt = ("--prompt", "Once", "--temperature", 3, "--seed", 2, "-n", 40, "--ignore-eos")
    assert command(generate, model, *prompt, "--json") == 0
    text = documents(capsys.readouterr().out)[0]["text"]
    word = next(word for word in text.split() if len(word) > 3 and word.isascii())
    before = text[: text.index(word)]
    assert command(generate, model, *prompt, "--stop", word) == 0
    assert capsys.readouterr().out == before + "\n"
    assert command(generate, model, *prompt, "--stop", word, "--prompt", "x", "--json") == 0
    assert documents(capsys.readouterr().out)[0]["finish_reason"] in ("stop", "length")


def test_a_prompt_is_plain_text_unless_it_is_said_to_be_special(model, capsys):
    arguments = (model, "--prompt", "<|im_end|>" * 9)
    plain = len(ids_of(small_tokenizer(), "<|im_end|>" * 9)) - 1
    assert command(generate, *arguments) == 2
    assert f"a sequence of {plain} tokens is longer" in capsys.readouterr().err
    assert command(generate, *arguments, "--special") == 0
    assert "prompt 1 has 9 tokens" in capsys.readouterr().err


def test_an_empty_prompt_begins_a_text(model, capsys):
    assert command(generate, model, "--prompt", "", "-n", 3, "--greedy", "--json") == 0
    found = documents(capsys.readouterr().out)[0]["ids"]
    assert found == small_model().generate([0], 3, Sampler.greedy(), stop=(0, 7))


def test_the_room_left_is_all_there_is(model, capsys):
    ids = ",".join(["9"] * (CONTEXT - 3))
    assert command(generate, model, "--prompt-ids", ids, "--ignore-eos", "--json") == 0
    done = capsys.readouterr()
    assert documents(done.out)[0]["tokens"] == 4
    assert "so at most 4 can follow" in done.err


def test_a_model_without_a_tokenizer_takes_and_prints_ids(tmp_path, capsys):
    small_model().save_bin(tmp_path / "m.rbw")
    arguments = (tmp_path / "m.rbw", "--prompt-ids", "5 6", "--greedy", "-n", 4)
    assert command(generate, *arguments) == 0
    expected = small_model().generate([5, 6], 4, Sampler.greedy())
    assert capsys.readouterr().out == ",".join(map(str, expected)) + "\n"
    assert command(generate, *arguments, "--json") == 0
    (found,) = documents(capsys.readouterr().out)
    assert (found["prompt"], found["text"], found["ids"]) == ([5, 6], None, expected)
    assert command(generate, tmp_path / "m.rbw", "--prompt", "x") == 2
    assert "has no tokenizer beside it" in capsys.readouterr().err


REFUSED = {
    "no prompt": ([], "there is no prompt"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "--temperature is -1"),
    "nan": (["--prompt", "x", "--temperature", "nan"], "temperature must be a finite number"),
    "top-p": (["--prompt", "x", "--top-p", "2"], "top_p must be"),
    "greedy": (["--prompt", "x", "--greedy", "--top-k", "2"], "--greedy always takes"),
    "seed": (["--prompt", "x", "--seed", "-2"], "--seed is -2"),
    "n": (["--prompt", "x", "-n", "0"], "--max-tokens is 0"),
    "ids": (["--prompt-ids", "1,600"], "token id 600 is outside the vocabulary"),
    "no ids": (["--prompt-ids", "1,-2"], "'-2' is no id"),
    "too long": (["--prompt-ids", ",".join("9" * 49)], "a sequence of 49 tokens is longer"),
    "no file": (["--prompts", "nowhere.txt"], "cannot read nowhere.txt: No such file"),
    "not UTF-8": (["--prompts", "latin.txt"], "latin.txt, line 2: it is not UTF-8"),
    "empty file": (["--prompts", "empty.txt"], "empty.txt has no prompts in it"),
    "not JSON": (["--prompts", "bad.jsonl"], "bad.jsonl, line 1: it is not JSON"),
    "no field": (["--prompts", "other.jsonl"], "has no field 'prompt'"),
    "surrogate": (["--prompt", "\udcff"], "--prompt is not UTF-8"),
    "step": (["--prompt", "x", "--step", "3"], "is no run"),
    "stop": (["--prompt", "x", "--stop", "600"], "token id 600 is outside the vocabulary"),
    "no stop": (["--prompt", "x", "--stop", ""], "--stop is empty"),
    "special": (["--prompt", "x", "--special", "--chat"], "--special does nothing with --chat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_a_line(case, model, tmp_path, monkeypatch, capsys):
    arguments, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"good\ncaf\xe9\n")
    Path("empty.txt").write_bytes(b"\n \n")
    Path("bad.jsonl").write_text("{'prompt'}\n")
    Path("other.jsonl").write_text('{"text": "x"}\n')
    assert command(generate, model, *arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.startswith("fastbrain: ")
    assert done.err.count("\n") == 1
    assert message in done.err


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    assert command(generate, tmp_path / "none", "--prompt", "x") == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_ctrl_c_ends_the_line(model, monkeypatch, capsys):
    picks = []

    def pick(self, logits, history):
        picks.append(1)
        if len(picks) > 2:
            raise KeyboardInterrupt
        return small_tokenizer().token_to_id("e")

    monkeypatch.setattr(Sampler, "pick", pick)
    assert command(generate, model, "--prompt", "x") == 130
    assert capsys.readouterr().out == "ee\n"


def test_a_conversation_ends_with_the_token_that_ends_a_turn(model, monkeypatch, capsys):
    tokenizer = small_tokenizer()
    turn_end = tokenizer.token_to_id("<|im_end|>")
    monkeypatch.setattr(Sampler, "pick", lambda *_: turn_end)
    for more, found in ((["--chat"], [turn_end]), ([], [turn_end] * 3)):
        assert command(generate, model, "--prompt", "x", "-n", 3, "--json", *more) == 0
        assert documents(capsys.readouterr().out)[0]["ids"] == found


def test_half_a_character_at_the_end_of_a_stream_is_shown(model, monkeypatch, capsys):
    first = small_tokenizer().encode("\U0001f600").ids[0]
    monkeypatch.setattr(Sampler, "pick", lambda *_: first)
    assert command(generate, model, "--prompt", "x", "-n", 1) == 0
    assert capsys.readouterr().out == "\ufffd\n"


def test_the_examples_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("one\ntwo\n")
    for words in examples(generate, {"runs/first": str(model)}):
        assert command(generate, *words) == 0, capsys.readouterr().err
