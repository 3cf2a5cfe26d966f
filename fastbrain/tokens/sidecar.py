"""What is known of a token file, kept beside it in `<file>.json`, and whether that still holds.

Reading 14 GB to learn that nothing changed would be as bad as tokenizing them again, so a file is
taken for unchanged if its size and time are those recorded. Where the time differs, or was too
recent when it was recorded to tell a later change from, the SHA-256 decides.
"""

import glob
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fastbrain import atomic

_FORMAT = 1
_MOST_BYTES = 64 << 20  # of a folder of a quarter of a million files
_SETTLED = 2_000_000_000  # ns after which the next change of a file gets another time for certain


@dataclass(frozen=True)
class FileState:
    """A file at one moment; `mtime_ns` is None where it cannot vouch for the content."""

    name: str
    bytes: int
    mtime_ns: int | None
    sha256: str

    @classmethod
    def of(cls, path: Path, name: str, sha256: str | None = None) -> Self:
        """The file now; its digest is computed unless it is known."""
        with atomic.io_errors("read", path):
            found = path.stat()
        settled = time.time_ns() - found.st_mtime_ns > _SETTLED
        digest = sha256 or atomic.sha256_of(path)
        return cls(name, found.st_size, found.st_mtime_ns if settled else None, digest)

    def again(self, path: Path) -> Self | None:
        """The state of `path` now if it still has this content, else None."""
        try:
            found = path.stat()
        except OSError:
            return None
        if found.st_size != self.bytes:
            return None
        if found.st_mtime_ns == self.mtime_ns:
            return self
        now = self.of(path, self.name)
        return now if now.sha256 == self.sha256 else None


@dataclass(frozen=True)
class Sidecar:
    """The record of one token file; where it was made elsewhere, much is None.

    Attributes:
        tokens, max_id, sha256: of the token file.
        tokenizer_sha256: of the tokenizer that made it.
        text_bytes: of the text that it was made from, in UTF-8.
        documents, skipped: how many texts it was made from, and how many were left out.
        field, separator: the other settings that decided the ids.
        sources: the files that it was made from.
        file: the token file itself.
    """

    tokens: int
    max_id: int
    sha256: str
    file: FileState
    tokenizer_sha256: str | None = None
    text_bytes: int | None = None
    documents: int | None = None
    skipped: int | None = None
    field: str | None = None
    separator: int | None = None
    sources: tuple[FileState, ...] = ()

    def write(self, path: Path) -> None:
        """Put it beside the token file `path`, durably."""
        record = {"format": _FORMAT, **asdict(self)}
        atomic.write_bytes(beside(path), (json.dumps(record, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The one beside the token file `path`; None if there is none that can be used."""
        try:
            if beside(path).stat().st_size > _MOST_BYTES:
                return None
            record = json.loads(beside(path).read_bytes())
            if record.pop("format") != _FORMAT:
                return None
            record["sources"] = tuple(FileState(**source) for source in record["sources"])
            record["file"] = FileState(**record["file"])
            return cls(**record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def beside(path: Path) -> Path:
    """Where the record of a token file lies."""
    return path.with_name(path.name + ".json")


def sweep(path: Path) -> None:
    """Remove what writers of `path` left half done when they were killed."""
    prefix = f".tmp-{path.name}-"
    for found in path.parent.glob(f"{glob.escape(prefix)}*"):
        pid = found.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            with suppress(OSError):
                found.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
