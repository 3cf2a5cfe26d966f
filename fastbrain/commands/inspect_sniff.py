"""What a file is, by its first bytes; its name counts only where those say nothing.

Only the head is read, so a file of any size and any content is answered at once.
"""

import re
import struct
from pathlib import Path

from fastbrain.commands.inspect_finding import Unknown
from fastbrain.formats.safetensors_file import MAX_HEADER_BYTES
from fastbrain.tokens import sidecar
from fastbrain.tokens.sniff import impostor

HEAD = 1 << 16

_OWN = {b"RBWTS001": "rbw", b"RBOPT001": "opt", b"RBLOR001": "rbl", b"GGUF": "gguf"}

_NEVER = "fastbrain never opens these, because reading one runs whatever it says"
_MAGIC = {
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x7fELF": "a program or library (ELF)",
    b"MZ": "a program or library of Windows",
    b"\x93NUMPY": "a numpy array (.npy)",
    b"PAR1": "a parquet table",
    b"\x89HDF": "an HDF5 file",
    b"\x89PNG": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"%PDF": "a PDF document",
    b"SQLite format 3": "an SQLite database",
    b"#!": "a script",
    b"<!DOCTYPE": "an HTML page",
    b"<html": "an HTML page",
}
# protocols 2 to 5 begin with their number, 0 and 1 with what they build first
_PICKLE = re.compile(
    rb"\x80[\x02-\x05]|c[\w.]+\n\w+\n|\(?[ld]p?\d+\n|[(\]})][lcK(q\x8c]?.{0,40}c[\w.]+\n\w+\n", re.S
)
_TOML = re.compile(r'\s*(#[^\n]*\n\s*)*(\[[\w.\-" ]+\]|[\w."-]+\s*=)')
_BY_NAME = {
    ".rbw": "rbw",
    ".opt": "opt",
    ".safetensors": "safetensors",
    ".bin": "tokens",
    ".packed": "packed",
    ".json": "json",
    ".jsonl": "jsonl",
    ".toml": "toml",
}


def kind(path: Path, head: bytes, size: int) -> str:
    """What it is: a key of `inspect`'s table, such as `rbw`, `tokens` or `json`.

    Raises:
        Unknown: none of these; says what it looks like.
    """
    for magic, found in _OWN.items():
        if head.startswith(magic):
            return found
    foreign = _foreign(head)
    if foreign:
        raise Unknown(foreign)
    if _is_safetensors(head):
        return "safetensors"
    text = _text(head)
    if text is not None and text.lstrip().startswith("{"):
        return "json"
    if text is not None and _TOML.match(text):
        return "toml"
    named = _BY_NAME.get(path.suffix)
    if named:
        return named
    if text is not None:
        raise Unknown("text, which is nothing that fastbrain wrote" if text else "an empty file")
    if sidecar.beside(path).is_file() or _may_be_ids(head, size):
        return "tokens"
    raise Unknown("a file of bytes that nothing of fastbrain's begins with")


def _foreign(head: bytes) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        if b".pkl" in head[:512]:
            return f"a zip archive around a pickle, as torch.save writes it; {_NEVER}"
        return "a zip archive"
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return what
    if _PICKLE.match(head):
        return f"a pickle file; {_NEVER}"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return None


def _is_safetensors(head: bytes) -> bool:
    if len(head) < 9 or head[8:9] != b"{":
        return False
    [length] = struct.unpack_from("<Q", head)
    return bool(2 <= length <= MAX_HEADER_BYTES)


def _text(head: bytes) -> str | None:
    if b"\0" in head:
        return None
    try:
        # the head may end within a character, of four bytes at most
        text = head[:-4].decode() + head[-4:].decode(errors="ignore")
    except UnicodeDecodeError:
        return None
    readable = sum(each.isprintable() or each.isspace() for each in text[:4096])
    return text.removeprefix("\ufeff") if readable >= 0.95 * len(text[:4096]) else None


def _may_be_ids(head: bytes, size: int) -> bool:
    if size % 4 or size < 64:
        return False
    block = head[: len(head) // 4 * 4]
    # no vocabulary comes near 2**24, and the top byte of other data is seldom 0 throughout
    return not any(block[3::4]) and impostor([block]) is None
