"""Text to token ids, once: a second call with the same text and tokenizer does nothing.

The token file is renamed into place, and then its record (`sidecar.py`) is; a call that was
killed at any point is simply made again, and of two at once the last wins, with the same bytes.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from fastbrain import atomic
from fastbrain.errors import EmptyDataset, InvalidConfig, InvalidDataset, Io, TokenOutOfRange
from fastbrain.tokens.documents import Tally
from fastbrain.tokens.encode import encode
from fastbrain.tokens.faults import Faults, OnError
from fastbrain.tokens.id_writer import IdWriter
from fastbrain.tokens.progress import Progress
from fastbrain.tokens.sidecar import FileState, Sidecar, beside, sweep
from fastbrain.tokens.sources import all_documents, source_files, texts
from fastbrain.tokens.token_file import TokenFile
from fastbrain.tokens.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)

__all__ = ["Prepared", "load_tokenizer", "prepare", "texts", "tokenizer_sha256", "train_tokenizer"]


@dataclass(frozen=True)
class Prepared:
    """A token file that is ready to train on.

    Attributes:
        path, tokens, max_id, sha256: the file, its length in tokens, its largest id, its digest.
        tokenizer_sha256: of the tokenizer that made it; None if it came without a record.
        text_bytes: UTF-8 bytes of the text behind the tokens, for bits per byte; None likewise.
        documents, skipped: how many became tokens and how many were left out; None likewise.
    """

    path: Path
    tokens: int
    max_id: int
    sha256: str
    tokenizer_sha256: str | None
    text_bytes: int | None
    documents: int | None
    skipped: int | None


class _Job(NamedTuple):
    """What decides the ids of a token file, and what to do about bad documents."""

    files: dict[str, Path]
    field: str
    separator: int | None
    tokenizer: Tokenizer
    tokenizer_sha256: str
    on_error: OnError


def prepare(
    source: atomic.StrPath,
    target: atomic.StrPath,
    tokenizer: Tokenizer | atomic.StrPath | None,
    field: str = "text",
    *,
    separator: str | int | None = END_OF_TEXT,
    on_error: OnError = "fail",
    progress: bool | None = None,
) -> Prepared:
    """Make the token file `target` of the text in `source`, unless it is there already.

    Args:
        source: a .txt file (one document), a .jsonl file (one to a line), either also packed as
            .gz or .zst, a .parquet table (one to a row), or a directory of such files, taken in
            the order of their names. A .bin is a token file: it is used where it lies, and
            `target` is not touched.
        target: the token file; beside it its record, `<target>.json`.
        tokenizer: a tokenizer, or the path of a tokenizer.json or of a directory with one; None
            will do for a .bin.
        field: where a line of JSON has its text.
        separator: the token that ends every document, as text or id; None for none.
        on_error: whether a bad document stops the work ("fail") or is left out ("skip").
        progress: whether to show it on standard error; None does so on a terminal.

    Nothing is done if the record says that the same sources, tokenizer and settings made the
    file; what counts as the same is told in `sidecar.py`. Raises InvalidDataset for bad text,
    EmptyDataset if there is none, Io, Serde, and InvalidConfig for arguments that cannot be met.
    """
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(tokenizer)
    if os.fspath(source).endswith(".bin"):
        return _existing(Path(source), tokenizer)
    if tokenizer is None:
        raise InvalidConfig(f"a tokenizer is needed to turn {os.fspath(source)} into token ids")
    target, files = Path(target), source_files(Path(source))
    end = _separator_id(separator, tokenizer)
    job = _Job(files, field, end, tokenizer, tokenizer_sha256(tokenizer), on_error)
    # a link to a token file elsewhere is followed, so what a killed call left lies there
    sweep(Path(os.path.realpath(target)))
    sweep(beside(target))
    recorded = Sidecar.read(target)
    valid = _still_valid(recorded, target, job) or _tokenize(target, job, progress)
    if valid != recorded:
        valid.write(target)
    return _prepared(target, valid)


def _tokenize(target: Path, job: _Job, progress: bool | None) -> Sidecar:
    before = [path.stat() for path in job.files.values()]
    faults, tally = Faults(job.on_error), Tally()
    size = sum(found.st_size for found in before)
    with Progress(target.name, size, progress) as shown, atomic.replacing(target) as file:
        writer = IdWriter(file)

        def read(bytes_read: int) -> None:
            shown.update(bytes_read, writer.tokens)

        documents = all_documents(job.files, job.field, faults, tally, read)
        for ids in encode(documents, job.tokenizer, job.separator):
            writer.add(ids)
        if writer.tokens == 0:
            raise EmptyDataset(f"there is no text in {', '.join(map(str, job.files.values()))}")
        sources = tuple(FileState.of(path, name) for name, path in job.files.items())
        for path, found in zip(job.files.values(), before, strict=True):
            now = path.stat()
            if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
                raise InvalidDataset(f"{path} changed while it was read; prepare it again")
    faults.report(tally.documents)
    return Sidecar(
        tokens=writer.tokens,
        max_id=writer.max_id,
        sha256=writer.sha256(),
        tokenizer_sha256=job.tokenizer_sha256,
        text_bytes=tally.text_bytes,
        documents=tally.documents,
        skipped=faults.skipped,
        field=job.field,
        separator=job.separator,
        sources=sources,
        file=FileState.of(target, target.name, writer.sha256()),
    )


def _still_valid(recorded: Sidecar | None, target: Path, job: _Job) -> Sidecar | None:
    """The record, with times brought up to date, if what it tells of is what the job would make."""
    if (
        recorded is None
        or recorded.tokenizer_sha256 != job.tokenizer_sha256
        or (recorded.field, recorded.separator) != (job.field, job.separator)
        or (recorded.skipped and job.on_error == "fail")
        or [source.name for source in recorded.sources] != list(job.files)
    ):
        return None
    file = recorded.file.again(target)
    sources = [s.again(job.files[s.name]) for s in recorded.sources]
    if file is None or None in sources:
        return None
    return replace(recorded, file=file, sources=tuple(s for s in sources if s))


def _existing(path: Path, tokenizer: Tokenizer | None) -> Prepared:
    """A token file that is there: what its record says, or what reading it through does."""
    recorded = Sidecar.read(path)
    file = recorded and recorded.file.again(path)
    if recorded and file:
        made_by = recorded.tokenizer_sha256
        if tokenizer and made_by not in (None, tokenizer_sha256(tokenizer)):
            raise InvalidDataset(
                f"{path} was made by the tokenizer {made_by}, but this one is "
                f"{tokenizer_sha256(tokenizer)}; use the one, or prepare the text with the other"
            )
        valid = replace(recorded, file=file)
    else:
        with TokenFile.open(path, 0) as opened:
            tokens, max_id = opened.tokens(), opened.max_id()
        file = FileState.of(path, path.name)
        valid = Sidecar(
            tokens=tokens,
            max_id=max_id,
            sha256=file.sha256,
            file=file,  # the rest is unknown
        )
    if tokenizer and valid.max_id >= tokenizer.get_vocab_size():
        raise TokenOutOfRange(valid.max_id, tokenizer.get_vocab_size())
    if valid != recorded and (recorded or not beside(path).exists()):
        with suppress(Io):  # it only saves time, and data may lie where nothing can be written
            valid.write(path)
    return _prepared(path, valid)


def _prepared(path: Path, known: Sidecar) -> Prepared:
    return Prepared(
        path=path,
        tokens=known.tokens,
        max_id=known.max_id,
        sha256=known.sha256,
        tokenizer_sha256=known.tokenizer_sha256,
        text_bytes=known.text_bytes,
        documents=known.documents,
        skipped=known.skipped,
    )


def _separator_id(separator: str | int | None, tokenizer: Tokenizer) -> int | None:
    if not isinstance(separator, str):
        return separator
    found: int | None = tokenizer.token_to_id(separator)
    if found is None:
        raise InvalidConfig(
            f"separator is {separator!r}, which is no token of the tokenizer; name the one that "
            "ends a text there, or pass separator=None to run documents into one another"
        )
    return found
