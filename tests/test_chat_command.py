"""`fastbrain chat`: turns through the template, commands, and a conversation too long to keep."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from help_examples import examples
from made_runs import command
from small_models import saved, small_model
from texts import small_tokenizer

from fastbrain import Sampler, SequenceTooLong
from fastbrain.commands import chat
from fastbrain.commands.chat_session import Session
from fastbrain.generate import Cache
from fastbrain.tokens.chat_template import CHATML, ChatTemplate
from fastbrain.tokens.tokenizer_files import TokenizerFiles

CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = saved(tmp_path_factory.mktemp("model"), CONTEXT)
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def files(model) -> TokenizerFiles:
    return TokenizerFiles.read(model.parent)


def session(files: TokenizerFiles, n: int = 6, system: str | None = None) -> Session:
    return Session(small_model(CONTEXT), files, Sampler.greedy(), n, system)


def spoken(monkeypatch, capsys, model, data: str | bytes, *arguments: object) -> str:
    """What chat prints for this standard input."""
    data = data.encode() if isinstance(data, str) else data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert command(chat, model, "--greedy", "-n", 5, *arguments) == 0
    return capsys.readouterr().out


def test_an_answer_follows_the_rendered_conversation(files):
    talk, shown = session(files, system="Be brief."), []
    for question in ("Hello", "And then?"):
        asked = [*talk.messages, {"role": "user", "content": question}]
        ids = ChatTemplate(files).encode(asked, add_generation_prompt=True).ids
        stop = ChatTemplate(files).end_ids
        expected = small_model(CONTEXT).generate(ids, 6, Sampler.greedy(), stop)
        reply = talk.ask(question, shown.append)
        said = [id for id in expected if id not in stop]
        assert reply.content == small_tokenizer().decode(said, skip_special_tokens=False)
        assert reply.tokens == len(expected)
        assert talk.messages == [*asked, {"role": "assistant", "content": reply.content}]
    assert "".join(shown) == "".join(
        each["content"] for each in talk.messages if each["role"] == "assistant"
    )


def test_an_unchanged_beginning_is_not_read_again(files, monkeypatch):
    talk = session(files, 3)
    answer = small_tokenizer().encode("and").ids
    picks = iter([*answer, files.tokenizer.token_to_id("<|im_end|>")] * 2)
    monkeypatch.setattr(Sampler, "pick", lambda *_: next(picks))
    talk.ask("Hello", lambda piece: None)
    first = talk._decoder
    talk.ask("Hello", lambda piece: None)
    assert talk._decoder is first
    fed = first.history()
    assert fed[:-1] == ChatTemplate(files).encode(talk.messages).ids[: len(fed) - 1]
    talk.set_system("Be brief.")
    picks = iter([4, 0])
    talk.ask("Hello", lambda piece: None)
    assert talk._decoder is not first


def test_the_oldest_turns_go_when_the_model_is_full(files):
    talk = session(files, 8, system="Be brief.")
    dropped = [talk.ask(f"Question {i}, and some more words", print).dropped for i in range(8)]
    assert dropped[0] == 0
    assert 2 in dropped
    assert talk.system == "Be brief."
    assert talk.messages[1]["role"] == "user"
    assert talk.messages[1]["content"] != "Question 0, and some more words"
    assert talk.messages[-2]["content"] == "Question 7, and some more words"
    ids = ChatTemplate(files).encode(talk.messages).ids
    assert len(ids) <= CONTEXT


def test_old_turns_go_where_they_leave_an_answer_no_room(files):
    talk = session(files, 40)
    talk.messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    question = {"role": "user", "content": "z"}

    def length():
        messages = [*talk.messages, question]
        return len(ChatTemplate(files).encode(messages, add_generation_prompt=True).ids)

    # a token each
    talk.messages[0]["content"] += "~" * (CONTEXT - 10 - length())
    assert CONTEXT - 20 < length() < CONTEXT
    assert talk.ask("z", print).dropped == 2


def test_a_question_that_is_too_long_is_forgotten(files):
    talk = session(files)
    talk.ask("Hello", print)
    before = list(talk.messages)
    with pytest.raises(SequenceTooLong):
        talk.ask("x" * 2 * CONTEXT, print)
    # nothing that would have had to make room for it is lost
    assert talk.messages == before
    assert talk.ask("Hello", print).tokens > 0


def test_ctrl_c_keeps_what_was_said(files, monkeypatch):
    talk, ids = session(files), [*small_tokenizer().encode("yes").ids]
    before = Sampler.pick

    def pick(self, logits, history):
        if not ids:
            raise KeyboardInterrupt
        return ids.pop(0)

    monkeypatch.setattr(Sampler, "pick", pick)
    reply = talk.ask("Hello", print)
    assert (reply.content, reply.finish_reason) == ("yes", "interrupted")
    assert [each["content"] for each in talk.messages] == ["Hello", "yes"]
    assert talk.ask("Again", print).tokens == 0
    assert [each["content"] for each in talk.messages] == ["Hello", "yes"]
    monkeypatch.setattr(Sampler, "pick", before)
    assert talk.ask("Again", print).tokens > 0


def test_an_answer_stopped_anywhere_leaves_the_next_one_as_it_would_be(files, monkeypatch):
    talk, feed = session(files), Cache.feed
    said = iter([*small_tokenizer().encode("and").ids, files.tokenizer.token_to_id("<|im_end|>")])
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "pick", lambda *_: next(said))  # the next turn goes on from it
        talk.ask("Hello", print)
    before = list(talk.messages)

    def interrupted(self, rows):
        feed(self, rows)  # read, and not yet known to the decoder
        raise KeyboardInterrupt

    monkeypatch.setattr(Cache, "feed", interrupted)
    assert talk.ask("Again", print).finish_reason == "interrupted"
    monkeypatch.setattr(Cache, "feed", feed)
    assert talk.messages == before
    fresh = session(files)
    fresh.messages = list(before)
    assert talk.ask("Again", print).content == fresh.ask("Again", print).content
    assert talk._decoder._cache.lengths == fresh._decoder._cache.lengths


def test_the_commands(monkeypatch, capsys, model):
    lines = ["/help", "/undo", "Hello", "/undo", "/undo", "/system", "/system Be brief.", "/reset",
             "/system", "/fly", "", "/exit", "never read"]  # fmt: skip
    out = spoken(monkeypatch, capsys, model, "\n".join(lines)).splitlines()
    assert out[0].startswith("/reset")
    talk = out[5:]
    assert talk[0] == "(there is nothing to undo)"
    assert talk[-7:] == [
        "(forgotten)", "(there is nothing to undo)", "(system: says nothing)",
        "(system: Be brief.)", "(forgotten)", "(system: Be brief.)",
        "(there is no /fly; /help lists the commands)",
    ]  # fmt: skip


def test_a_terminal_can_be_typed_at(monkeypatch, capsys):
    from fastbrain.commands import chat_lines

    typed = iter(["one", KeyboardInterrupt, "\udcff", "two", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert list(chat_lines.typed()) == ["one", "two"]
    assert capsys.readouterr().out == "\n(Ctrl-D or /exit leaves)\n(that was not UTF-8)\n\n"


def test_what_was_undone_is_not_part_of_the_conversation(monkeypatch, capsys, model):
    out = [
        spoken(monkeypatch, capsys, model, text).splitlines()[-1]
        for text in ("Bye\nHello\n", "Bye\nOther\n/undo\nHello\n", "Other\n/reset\nBye\nHello\n")
    ]
    assert out[0] == out[1] == out[2]


def test_a_script_gets_one_object_for_each_answer(monkeypatch, capsys, model, files):
    lines = [
        '{"role": "system", "content": "Be brief."}',
        '{"role": "user", "content": "One"}',
        "/reset is no command here",
        "",
        '{"role": "assistant", "content": "So I say."}',
        "\u00e9t\u00e9",
    ]
    out = spoken(monkeypatch, capsys, model, "\n".join(lines), "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == 3
    assert set(found[0]) == {
        "role", "content", "finish_reason", "tokens", "tokens_per_s", "dropped",
    }  # fmt: skip
    talk = session(files, 5, "Be brief.")
    for question in ("One", "/reset is no command here"):
        assert talk.ask(question, print).content == found.pop(0)["content"]
    talk.messages.append({"role": "assistant", "content": "So I say."})
    assert talk.ask("\u00e9t\u00e9", print).content == found[0]["content"]


REFUSED = {
    "role": (b'{"role": "bot", "content": "x"}', 'line 1: "role" must be system, user'),
    "content": (b'\n{"role": "user"}', 'line 2: "content" must be text, got None'),
    "json": (b"{broken", "line 1: it is not JSON"),
    "utf-8": (b"caf\xe9", "line 1: it is not UTF-8"),
    "surrogate": (b'{"role": "user", "content": "\\ud800"}', "half of a surrogate pair"),
    "too long": (b"x" * 2 * CONTEXT, "is longer than the model's max_seq_len"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_lines_are_refused_in_a_line(case, monkeypatch, capsys, model):
    data, message = REFUSED[case]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert command(chat, model, "--json") == 2
    done = capsys.readouterr()
    assert message in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)


def test_a_model_without_a_tokenizer_cannot_talk(tmp_path, capsys):
    small_model().save_bin(tmp_path / "m.rbw")
    assert command(chat, tmp_path / "m.rbw") == 2
    assert "has no tokenizer beside it" in capsys.readouterr().err


def test_the_examples_work(monkeypatch, capsys, model):
    for words in examples(chat, {"runs/first": str(model)}):
        assert "|" not in shlex.join(words)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
        assert command(chat, *words) == 0, capsys.readouterr().err
