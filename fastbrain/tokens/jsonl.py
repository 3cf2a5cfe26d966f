"""JSON lines to a token file, in one pass and bounded memory."""

import os

from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.tokens.documents import Tally, json_lines
from fastbrain.tokens.encode import Tokenize, encode
from fastbrain.tokens.faults import Faults, OnError, OnSkip
from fastbrain.tokens.id_writer import IdWriter
from fastbrain.tokens.progress import Progress


def write_jsonl(
    path: atomic.StrPath,
    jsonl: atomic.StrPath,
    field: str,
    separator: int | None,
    tokenize: Tokenize,
    *,
    on_error: OnError = "fail",
    on_skip: OnSkip | None = None,
    progress: bool | None = None,
) -> int:
    """Write the token file `path` from the documents of `jsonl`; returns the number of tokens.

    Args:
        path: replaced once all is well; until then, and after an error, as it was.
        jsonl: one JSON object to a line, UTF-8, plain or packed by gzip or zstd. Lines end at
            "\\n" only; those of nothing but white space are passed over.
        field: the name of the string that is the document.
        separator: the id written after every document, also the last; None writes none.
        tokenize: a function from a text to its ids, or a tokenizer, whose special tokens are
            plain text here, which adds none, and which runs in parallel.
        on_error: what a bad line does. "fail" raises InvalidDataset with its number and the
            reason, "skip" leaves it out and warns once, at the end.
        on_skip: called as on_skip(line, reason) for each line left out, instead of the warning.
        progress: whether to show it on standard error; None does so on a terminal.
    """
    faults, tally = Faults(on_error, on_skip), Tally()
    with atomic.io_errors("read", jsonl):
        size = os.stat(jsonl).st_size
    if os.path.realpath(path) == os.path.realpath(jsonl):
        raise InvalidConfig(f"{os.fspath(path)} would be overwritten by its own tokens")
    with Progress("tokens", size, progress) as shown, atomic.replacing(path) as file:
        writer = IdWriter(file)

        def read(bytes_read: int) -> None:
            shown.update(bytes_read, writer.tokens)

        documents = json_lines(jsonl, field, faults, tally, read)
        for ids in encode(documents, tokenize, separator):
            writer.add(ids)
    faults.report(tally.documents)
    return writer.tokens
