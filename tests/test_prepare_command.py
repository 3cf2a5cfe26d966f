"""`fastbrain prepare`: token files from text, parquet and nanoGPT, and what it says of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from help_examples import examples
from made_runs import command
from texts import TOPICS, ids_of, small_tokenizer

from fastbrain.commands import prepare
from fastbrain.errors import InvalidDataset
from fastbrain.tokens import TokenFile
from fastbrain.tokens.prepare import prepare as prepare_tokens
from fastbrain.tokens.prepare import texts
from fastbrain.tokens.sources import source_files
from fastbrain.tokens.tokenizer import tokenizer_sha256

DOCUMENTS = ["One \u00e9t\u00e9.", "", "Two\nlines", "\u4e2d\u6587 \U0001f600"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text(small_tokenizer().to_str())
    Path("corpus.txt").write_text(TOPICS[4])
    rows = [json.dumps({"story": text}) for text in DOCUMENTS]
    Path("stories.jsonl").write_text("\n".join(rows))


def ids(name: str) -> list[int]:
    with TokenFile.open(name, 0) as file:
        return file.read(0, file.tokens()).tolist()


def prepared(capsys, *arguments: str) -> dict:
    assert command(prepare, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_what_it_made_and_what_it_says(capsys):
    arguments = ("stories.jsonl", "s.bin", "--tokenizer", "tokenizer.json", "--field", "story")
    found = prepared(capsys, *arguments)
    expected = ids_of(small_tokenizer(), *DOCUMENTS)
    assert ids("s.bin") == expected
    size = len("".join(DOCUMENTS).encode())
    assert found == {
        "path": "s.bin",
        "record": "s.bin.json",
        "documents": 4,
        "skipped": 0,
        "tokens": len(expected),
        "text_bytes": size,
        "bytes_per_token": round(size / len(expected), 4),
        "max_id": max(expected),
        "sha256": found["sha256"],
        "tokenizer_sha256": tokenizer_sha256(small_tokenizer()),
    }
    assert json.loads(Path(found["record"]).read_text())["sha256"] == found["sha256"]
    assert command(prepare, *arguments) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["documents"], lines["sha256"]) == ("4", found["sha256"])


def test_the_separator_is_a_choice(capsys):
    common = ("stories.jsonl", "s.bin", "--tokenizer", "tokenizer.json", "--field", "story")
    prepared(capsys, *common, "--separator", "none")
    plain = ids("s.bin")
    prepared(capsys, *common, "--separator", "<|pad|>")
    expected = ids_of(small_tokenizer(), *DOCUMENTS)
    assert plain == [id for id in expected if id != 0]
    assert ids("s.bin") == [id or 1 for id in expected]


@pytest.mark.filterwarnings("default:1 of 2 documents")
def test_bad_rows_stop_it_or_are_counted(capsys):
    Path("stories.jsonl").write_text('{"story": "one"}\n{"story": 2}\n')
    common = ("stories.jsonl", "s.bin", "--tokenizer", "tokenizer.json", "--field", "story")
    assert command(prepare, *common) == 2
    assert "line 2: its field 'story' is a number" in capsys.readouterr().err
    assert not Path("s.bin").exists()
    assert command(prepare, *common, "--on-error", "skip") == 0
    done = capsys.readouterr()
    assert "1, 1 left out" in done.out
    assert done.err.startswith("fastbrain: warning: 1 of 2 documents were skipped")


@pytest.mark.parametrize("count", [1, 100, (1 << 20) + 3])
def test_ids_of_nanogpt_become_ours(count, capsys):
    expected = np.random.default_rng(0).integers(0, 600, count)
    expected.astype("<u2").tofile("nano.bin")
    found = prepared(capsys, "nano.bin", "n.bin", "--import-u16", "--tokenizer", "tokenizer.json")
    assert ids("n.bin") == expected.tolist()
    assert (found["tokens"], found["max_id"]) == (count, int(expected.max()))
    assert (found["documents"], found["text_bytes"]) == (None, None)
    # its record is one that the others trust
    again = prepare_tokens("n.bin", "unused.bin", small_tokenizer())
    assert (again.tokens, again.sha256) == (count, found["sha256"])
    assert again.tokenizer_sha256 == tokenizer_sha256(small_tokenizer())


def test_ids_of_nanogpt_are_checked_against_the_tokenizer(capsys):
    np.array([5, 7, 600, 3], "<u2").tofile("nano.bin")
    common = ("nano.bin", "n.bin", "--import-u16")
    assert command(prepare, *common, "--tokenizer", "tokenizer.json") == 2
    assert "has the id 600 at position 2, and the tokenizer's ids are 0 to 599" in (
        capsys.readouterr().err
    )
    assert not Path("n.bin").exists()
    assert prepared(capsys, *common)["max_id"] == 600


def u16(data: bytes) -> list[str]:
    Path("bad.bin").write_bytes(data)
    return ["bad.bin", "n.bin", "--import-u16"]


OURS = np.arange(100, dtype="<u4").tobytes()
REFUSED = {
    "no tokenizer": (lambda: ["corpus.txt", "c.bin"], "--tokenizer is missing"),
    "target": (lambda: ["corpus.txt", "c.txt"], "the name of a token file ends in .bin"),
    "is one": (lambda: ["x.bin", "c.bin"], "x.bin is a token file already"),
    "separator": (
        lambda: ["corpus.txt", "c.bin", "--tokenizer", "tokenizer.json", "--separator", "<x>"],
        "separator is '<x>', which is no token",
    ),
    "nothing": (
        lambda: ["none.txt", "c.bin", "--tokenizer", "tokenizer.json"],
        "cannot read none.txt: No such file",
    ),
    "no file": (lambda: ["none.bin", "c.bin", "--import-u16"], "cannot read none.bin"),
    "odd": (lambda: u16(b"abc"), "has 3 bytes, and 16-bit ids are 2 bytes each"),
    "empty": (lambda: u16(b""), "bad.bin is empty"),
    "u32": (lambda: u16(OURS), "looks like 32-bit ids"),
    "text": (lambda: u16(b"This is no list of ids. " * 20), "looks like text"),
    "itself": (lambda: [*u16(OURS[:2])[:1], "bad.bin", "--import-u16"], "overwritten by its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_a_line(case, capsys):
    make, message = REFUSED[case]
    assert command(prepare, *make()) == 2
    done = capsys.readouterr()
    assert message in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)


def test_a_parquet_table_is_read_row_by_row(capsys):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = DOCUMENTS * 70  # more than are read at once, in groups that do not divide them
    kinds = [arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())]
    for kind in kinds:
        table = arrow.table({"id": range(len(rows)), "story": arrow.array(rows).cast(kind)})
        parquet.write_table(table, "t.parquet", row_group_size=33)
        found = prepared(
            capsys, "t.parquet", "t.bin", "--tokenizer", "tokenizer.json", "--field", "story"
        )
        assert ids("t.bin") == ids_of(small_tokenizer(), *rows)
        assert found["documents"] == len(rows)
        assert found["text_bytes"] == len("".join(rows).encode())
    assert list(texts("t.parquet", "story")) == rows


@pytest.mark.filterwarnings("default:1 of 2 documents")
def test_a_bad_parquet_table_is_refused_by_row_and_by_column(capsys):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a", None], "n": [1, 2]}), "t.parquet")
    common = ("t.parquet", "t.bin", "--tokenizer", "tokenizer.json")
    for more, message in (
        ([], "line 2: its field 'text' is null"),
        (["--field", "x"], "has no column 'x'; its columns are 'text', 'n'"),
        (["--field", "n"], "the column 'n' of t.parquet holds int64, not strings"),
    ):
        assert command(prepare, *common, *more) == 2
        assert message in capsys.readouterr().err
    assert command(prepare, *common, "--on-error", "skip") == 0
    data = Path("t.parquet").read_bytes()
    for cut in (data[:-9], b"PAR1", b""):
        Path("t.parquet").write_bytes(cut)
        assert command(prepare, *common) == 2
        done = capsys.readouterr().err
        assert "is not a parquet table, or is damaged" in done
    assert done.count("\n") == 1


def test_parquet_without_its_package_is_refused_by_the_name_of_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("folder").mkdir()
    Path("folder/a.txt").write_text("text")
    Path("folder/b.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidDataset, match=r"pip install 'fastbrain\[parquet\]'"):
        prepare_tokens("folder", "t.bin", small_tokenizer())
    assert not Path("t.bin").exists()
    with pytest.raises(InvalidDataset):  # before hours go into a.txt
        source_files(Path("folder"))


def test_the_examples_work(capsys):
    Path("nanogpt").mkdir()
    np.arange(500, dtype="<u2").tofile("nanogpt/train.bin")
    for words in examples(prepare):
        assert command(prepare, *words) == 0, capsys.readouterr().err
