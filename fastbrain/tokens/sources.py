"""Where text comes from: a file, or a directory of files in the order of their names."""

from collections.abc import Iterator
from pathlib import Path

from fastbrain import atomic
from fastbrain.errors import EmptyDataset, InvalidConfig
from fastbrain.tokens.documents import Document, Read, Tally, json_lines, text_file
from fastbrain.tokens.encode import parts
from fastbrain.tokens.faults import Faults
from fastbrain.tokens.parquet import parquet_rows, require_pyarrow

_TEXT = (".txt", ".txt.gz", ".txt.zst")
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PARQUET = (".parquet",)
_ALL = _TEXT + JSONL + _PARQUET


def source_files(source: Path, kinds: tuple[str, ...] = _ALL) -> dict[str, Path]:
    """The text files of a source by name, in order; `kinds` are the endings that they may have.

    Hidden files and those with other endings are passed over in a directory. Raises Io for a
    source that is not there, InvalidConfig for another kind of file, EmptyDataset for a directory
    without text, InvalidDataset for a parquet table where pyarrow is not installed.
    """
    with atomic.io_errors("read", source):
        source.stat()
    if not source.is_dir():
        if not source.name.endswith(kinds):
            others = "a directory of those, or a token file, .bin"
            raise InvalidConfig(
                f"source is {source}; it must be a {', '.join(kinds)} file, "
                f"{others if kinds is _ALL else 'or a directory of those'}"
            )
        return _readable({source.name: source})
    found = {path.relative_to(source).as_posix(): path for path in source.rglob("*")}
    files = {
        name: found[name]
        for name in sorted(found)
        if name.endswith(kinds)
        and not any(part.startswith(".") for part in name.split("/"))
        and found[name].is_file()
    }
    if not files:
        raise EmptyDataset(f"{source} has no {', '.join(kinds)} files in it")
    return _readable(files)


def _readable(files: dict[str, Path]) -> dict[str, Path]:
    # found out now, and not hours into the other files of a directory
    for path in files.values():
        if path.name.endswith(_PARQUET):
            require_pyarrow(path)
    return files


def all_documents(
    files: dict[str, Path], field: str, faults: Faults, tally: Tally, read: Read
) -> Iterator[Document]:
    """The documents of all files, one after another; `read` is told the bytes over all of them."""
    before = 0
    for path in files.values():

        def read_here(bytes_read: int, before: int = before) -> None:
            read(before + bytes_read)

        if path.name.endswith(JSONL):
            yield from json_lines(path, field, faults, tally, read_here)
        elif path.name.endswith(_PARQUET):
            yield from parquet_rows(path, field, faults, tally, read_here)
        else:
            yield from text_file(path, faults, tally, read_here)
        before += path.stat().st_size


def texts(source: atomic.StrPath, field: str = "text") -> Iterator[str]:
    """The text of a source of `prepare`, long documents in parts, to train a tokenizer on.

    Bad documents are left out: `prepare` is the one to report them.
    """
    faults = Faults("skip", lambda line, reason: None)
    documents = all_documents(source_files(Path(source)), field, faults, Tally(), lambda read: None)
    return (text for text, _ in parts(documents, may_cut=True))
