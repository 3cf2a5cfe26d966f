"""Rows of instruction data: every format read, every file of lines, and what is none refused."""

import gzip
import json
import re
from pathlib import Path

import pytest
from chat_texts import said

from fastbrain.errors import InvalidDataset
from fastbrain.tokens import json_rows as rows_module
from fastbrain.tokens.conversations import (
    FORMATS,
    Conversation,
    Tokenized,
    detect,
    read_row,
)
from fastbrain.tokens.json_rows import BadRow, json_rows

SYSTEM = {"role": "system", "content": ""}
ROWS = {
    "prompt and response": ({"prompt": "Q", "response": "A"}, said("Q", "A")),
    "prompt and completion": ({"prompt": "Q", "completion": "A"}, said("Q", "A")),
    "prompt and completion as messages": (
        {"prompt": [SYSTEM, *said("Q", "A", "R")], "completion": said("B", first="assistant")},
        [SYSTEM, *said("Q", "A", "R", "B")],
    ),
    "messages": ({"messages": said("Q", "A", "R", "B")}, said("Q", "A", "R", "B")),
    "messages with more in them": (
        {"messages": [{**m, "id": 5, "tool_calls": None} for m in said("Q", "A")], "id": 7},
        said("Q", "A"),
    ),
    "messages beside a prompt": ({"prompt": "Q", "messages": said("Q", "A")}, said("Q", "A")),
    "Alpaca": (
        {"instruction": "Do", "input": "this", "output": "A"},
        said("Do\n\nthis", "A"),
    ),
    "Alpaca with an empty input": (
        {"instruction": "Do", "input": " ", "output": "A"},
        said("Do", "A"),
    ),
    "Alpaca with null": ({"instruction": "Do", "input": None, "output": "A"}, said("Do", "A")),
    "Alpaca without input": ({"output": "A", "instruction": "Do"}, said("Do", "A")),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": ""},
                {"from": "human", "value": "Q"},
                {"from": "gpt", "value": "A"},
                {"from": "user", "value": "R"},
                {"from": "chatgpt", "value": "B"},
                {"from": "user", "value": "S"},
                {"from": "bing", "value": "C"},
            ]
        },
        [SYSTEM, *said("Q", "A", "R", "B", "S", "C")],
    ),
    "messages, assistant first": (
        {"messages": said("A", "Q", "B", first="assistant")},
        said("A", "Q", "B", first="assistant"),
    ),
    "messages, two prompts in a row": (
        {"messages": [*said("Q"), *said("R", "A")]},
        [*said("Q"), *said("R", "A")],
    ),
    "prompt and response with white space": (
        {"prompt": " Q\n", "response": "\n A "},
        said(" Q\n", "\n A "),
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_every_format_becomes_messages(case):
    row, messages = ROWS[case]
    form = detect(row)
    assert case.startswith(form.name)
    assert read_row(form, row) == Conversation(messages)


def test_ids_and_labels_are_taken_as_they_are():
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}
    assert detect(row).name == "pre-tokenized"
    assert read_row(detect(row), row) == Tokenized([5, 6, 7], [-100, 6, 7])


@pytest.mark.parametrize("row", [{}, {"text": "a"}, {"prompt": "a"}, {"input_ids": [1]}])
def test_a_row_of_no_known_format_is_told_the_known_ones(row):
    with pytest.raises(BadRow, match="must have one of these: input_ids and labels; messages; "):
        detect(row)


def test_a_row_of_another_format_is_refused():
    form = detect({"messages": []})
    with pytest.raises(BadRow, match="no field 'messages', but the rows before it are of the "):
        read_row(form, {"prompt": "Q", "response": "A"})


def one(*messages):
    return {"messages": list(messages)}


Q = {"role": "user", "content": "Q"}
A = {"role": "assistant", "content": "A"}
BAD = {
    "null prompt": ({"prompt": None, "response": "A"}, "the text 'prompt' is null, not a string"),
    "number": ({"prompt": "Q", "response": 5}, "the text 'response' is a number"),
    "no list": ({"messages": "Q"}, "its field 'messages' is a string, not a list"),
    "null messages": ({"messages": None}, "its field 'messages' is null, not a list"),
    "no messages": (one(), "its field 'messages' has no messages"),
    "message of text": (one("Q"), "message 0 of 'messages' is a string, not an object"),
    "no role": (one(Q, {"content": "A"}), "message 1 of 'messages' has no 'role'"),
    "no content": (one({"role": "user"}), "message 0 of 'messages' has no 'content'"),
    "null content": (one(Q, {**A, "content": None}), "the text of message 1 .* is null"),
    "parts": (one({**Q, "content": [{"type": "text"}]}, A), "message 0 of 'messages' is a list"),
    "unknown role": (one({**Q, "role": "bot\x1b"}, A), r"the role of message 0 .* is 'bot\\x1b'; "),
    "role of another kind": (one({**Q, "role": 3}, A), "is a number; it must be one of system, "),
    "role of another format": (
        {"conversations": [{"from": "narrator", "value": "Q"}]},
        "'narrator'; it must be one of human, user, gpt",
    ),
    "tools": (one(Q, {**A, "tool_calls": [1]}), "has 'tool_calls', which is not supported"),
    "ends with the user": (one(Q, A, Q), "the conversation ends with a user message; "),
    "ends with a tool": (one(Q, A, {**Q, "role": "tool"}), "ends with a tool message; it must end"),
    "ends with the system": (one(Q, A, {**Q, "role": "system"}), "ends with a system message; "),
    "blank response": (one(Q, {**A, "content": " \n\u3000"}, Q, A), "the response in message 1 is"),
    "blank prompt": (one({**Q, "content": ""}, A), "the prompt in message 0 is empty"),
    "surrogate": (one({**Q, "content": "\ud800"}, A), "message 0 .* half of a surrogate pair"),
    "half lists": ({"prompt": [Q], "completion": None}, "'completion' is null, not a list"),
    "no ids": ({"input_ids": [], "labels": []}, "its field 'input_ids' is empty"),
    "ids of text": ({"input_ids": "5", "labels": []}, "its field 'input_ids' is a string"),
    "boolean id": ({"input_ids": [True], "labels": [1]}, r"input_ids\[0\] is a boolean"),
    "float label": ({"input_ids": [1], "labels": [1.0]}, r"labels\[0\] is a number, not a whole"),
    "lengths": ({"input_ids": [1, 2], "labels": [1]}, "it has 2 input_ids and 1 labels"),
    "label of -1": ({"input_ids": [1, 2], "labels": [-1, 2]}, "label 0 is -1, but the id .* 1; "),
    "shifted": ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "label 0 is 2, but the id .* 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_says_what_is_wrong_with_it(case):
    row, reason = BAD[case]
    with pytest.raises(BadRow, match=reason):
        read_row(detect(row), row)


def test_every_format_has_a_row_here():
    seen = {detect(row).name for row, _ in ROWS.values()} | {"pre-tokenized"}
    assert seen == {form.name for form in FORMATS}


def test_the_formats_of_the_page_are_those_that_are_read():
    page = Path(__file__).parents[1] / "docs" / "instructions.md"
    shown = re.findall(r"^\| ([\w -]+) \| `(\{.*\})` \|$", page.read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in shown] == [form.name for form in FORMATS]
    for name, row in shown:
        form = detect(json.loads(row))
        assert form.name == name
        read_row(form, json.loads(row))


LINES = {
    "plain": (b'{"a": 1}\n{"a": 2}\n', [(1, 1), (2, 2)]),
    "no last newline": (b'{"a": 1}\n{"a": 2}', [(1, 1), (2, 2)]),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}\n', [(1, 1)]),
    "CRLF and blank": (b'\r\n{"a": 1}\r\n \t\r\n\xc2\xa0\n{"a": 2}\r\n', [(2, 1), (5, 2)]),
    "line separators": ('{"a": "\u2028\x85"}\n'.encode(), [(1, "\u2028\x85")]),
    "field twice": (b'{"a": 1, "a": 2}', [(1, 2)]),
    "nothing": (b"", []),
    "no JSON": (b'{"a": 1}\n{"a": \n{"a": 3}\n', [(1, 1), (2, "not JSON"), (3, 3)]),
    "no object": (b'["a"]\nnull\n', [(1, "a list, not an object"), (2, "null, not an object")]),
    "NaN": (b'{"a": NaN}\n', [(1, "NaN is no JSON number")]),
    "NUL": (b'{"a": 1}\n\0\0\0\n', [(1, 1), (2, "NUL bytes")]),
    "bad UTF-8": (b'{"a": "b\xff"}\n', [(1, 'byte 0xff after \'{"a": "b\'')]),
    "UTF-16": ('{"a": 1}\n'.encode("utf-16"), [(1, "UTF-16")]),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"}\n", [(1, "nested too deeply")]),
    "many digits": (b'{"a": ' + b"1" * 5000 + b"}\n", [(1, "not JSON that can be read")]),
}


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_lines_are_read_or_said_to_be_bad(tmp_path, case, pack):
    data, expected = LINES[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(pack(data))
    found = list(json_rows(path))
    assert [line for line, _ in found][: len(expected)] == [line for line, _ in expected]
    for (_, row), (_, value) in zip(found, expected, strict=case != "UTF-16"):
        if isinstance(row, BadRow):
            assert value in str(row)
        else:
            assert row["a"] == value


def test_an_archive_that_breaks_off_is_refused_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    lines = [json.dumps({"a": str(i * 7919**5)}) + "\n" for i in range(1000)]
    path.write_bytes(gzip.compress("".join(lines).encode())[:-2000])
    with pytest.raises(InvalidDataset, match=r"rows.jsonl.gz, line [0-9]+: the archive was cut"):
        list(json_rows(path))


def test_a_line_too_long_for_a_tokenizer_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_MOST_BYTES", 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "0123456789"}\n{"a": "0123456789AB"}\n')
    (_, good), (line, bad) = json_rows(path)
    assert good == {"a": "0123456789"}
    assert line == 2
    assert (bad.kind, str(bad)) == ("too long", "it has 22 bytes; at most 20 are read")
