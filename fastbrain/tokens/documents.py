"""Documents out of text files: one for each line of a JSONL file, one for each text file."""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fastbrain import atomic
from fastbrain.errors import InvalidDataset
from fastbrain.tokens.faults import Faults
from fastbrain.tokens.json_line import PIECE, BadText, field_text, not_utf8
from fastbrain.tokens.opened import Damaged, Opened, opened

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# told how many bytes of the file at hand, as it lies on the disk, were read so far
Read: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Document:
    """A text in pieces, which can be gone over again, and where it comes from, for messages."""

    place: str
    pieces: Iterable[str]


@dataclass
class Tally:
    """What was read so far: good documents, and the UTF-8 bytes of their text."""

    documents: int = 0
    text_bytes: int = 0


def json_lines(
    path: atomic.StrPath, field: str, faults: Faults, tally: Tally, read: Read
) -> Iterator[Document]:
    """The strings under `field` in the lines of a JSONL file, which end at "\\n" only.

    Lines of nothing but white space are passed over, and so is a byte order mark before the
    first. A line that is no document goes to `faults`; an archive that breaks off is
    InvalidDataset.
    """
    with opened(path) as source:
        for number, line in enumerate(lines(source, path), 1):
            read(source.read_bytes())
            try:
                if number == 1:
                    refuse_utf16(line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if is_blank(line):
                    continue
                pieces, size = field_text(line, field)
            except BadText as error:
                faults.add(path, number, str(error))
                continue
            tally.documents += 1
            tally.text_bytes += size
            yield Document(f"{os.fspath(path)}, line {number}", pieces)


def text_file(path: atomic.StrPath, faults: Faults, tally: Tally, read: Read) -> Iterator[Document]:
    """A text file as one document, or as none if it is blank; UTF-8, or it goes to `faults`.

    The file is read twice, a piece at a time: once to be sure of it, and once by the caller.
    """
    line, size, blank = 1, 0, True
    try:
        for piece in _text_pieces(path, lambda _: None):
            line += piece.count("\n")
            size += len(piece.encode())
            blank = blank and not piece.strip()
    except BadText as error:
        faults.add(path, line, str(error))
        return
    if not blank:
        tally.documents += 1
        tally.text_bytes += size
        yield Document(os.fspath(path), _TextOnDisk(path, read))


@dataclass(frozen=True)
class _TextOnDisk:
    path: atomic.StrPath
    read: Read

    def __iter__(self) -> Iterator[str]:
        try:
            yield from _text_pieces(self.path, self.read)
        except BadText as error:
            raise InvalidDataset(f"{os.fspath(self.path)} changed while it was read") from error


def lines(source: Opened, path: atomic.StrPath) -> Iterator[bytes]:
    """The lines of an open file, which end at "\\n" only; InvalidDataset where it is damaged."""
    done = 0
    try:
        with atomic.io_errors("read", path):
            for line in source.stream:
                yield line
                done += 1
    except Damaged as error:
        raise InvalidDataset(f"{os.fspath(path)}, line {done + 1}: {error}") from error


def _text_pieces(path: atomic.StrPath, read: Read) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with opened(path) as source:
        more = True
        try:
            refuse_utf16(source.stream.peek(2))
            while more:
                with atomic.io_errors("read", path):
                    block = source.stream.read(PIECE)
                more = bool(block)
                yield decoder.decode(block, final=not more)
                read(source.read_bytes())
        except UnicodeDecodeError as error:
            # what comes before it in the block counts for the number of its line
            yield error.object[: error.start].decode()
            raise not_utf8(error) from error
        except Damaged as error:
            raise BadText(str(error)) from error


def refuse_utf16(start: bytes) -> None:
    """Raises BadText for a file that begins as UTF-16 does."""
    if start.startswith(_UTF16):
        raise BadText("the file is UTF-16; save it as UTF-8")


def is_blank(line: bytes) -> bool:
    """Whether a line is nothing but white space."""
    if not line.strip():
        return True
    # white space beyond ASCII, which no JSON begins with
    return line[0] >= 0x80 and not line.decode(errors="replace").strip()
