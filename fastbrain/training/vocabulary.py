"""The tokenizer of a run, kept inside the run directory, with its special tokens and its template.

What a file of ids means hangs on this one file, so every checkpoint carries a copy of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.tokens.prepare import load_tokenizer, texts, train_tokenizer
from fastbrain.tokens.tokenizer import END_OF_TEXT, PAD, tokenizer_sha256
from fastbrain.tokens.tokenizer_files import TokenizerFiles

VOCABULARY = 4_096


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with what belongs to it, the file it is kept in, and its digest."""

    files: TokenizerFiles
    path: Path
    sha256: str

    @classmethod
    def keep(cls, files: TokenizerFiles, target: Path) -> Self:
        """Write a tokenizer to `target`, a tokenizer.json."""
        atomic.write_bytes(target, files.tokenizer.to_str(pretty=True).encode())
        # as it is read back, so that a resumed run has the very same one
        return cls.open(target, _record(files))

    @classmethod
    def open(cls, path: Path, record: Mapping[str, Any]) -> Self:
        """Load one that `keep` has written, with what `record` says beside it.

        Raises:
            InvalidConfig: the tokenizer does not know the tokens of the record.
            Io, Serde: it cannot be read.
        """
        tokenizer = load_tokenizer(path)
        try:
            files = TokenizerFiles(
                tokenizer,
                record["eos"],
                record["pad"],
                record.get("bos"),
                record.get("chat_template"),
                tuple(record.get("ends") or ()),
            )
        except InvalidConfig as error:
            raise InvalidConfig(f"{path}: {error}") from error
        return cls(files, path, tokenizer_sha256(tokenizer))

    def record(self) -> dict[str, Any]:
        """What `open` needs beside the file, as JSON holds it."""
        return {**_record(self.files), "tokenizer_sha256": self.sha256}

    @property
    def size(self) -> int:
        """The smallest vocabulary that holds every id, holes counted."""
        return self.files.size

    def text(self, ids: list[int]) -> str:
        """The text of ids, special tokens spelled out; unknown ids are nothing."""
        return str(self.files.tokenizer.decode(ids, skip_special_tokens=False))

    def bytes_of(self, ids: list[int]) -> int:
        """UTF-8 bytes of the text of ids, special tokens left out."""
        return len(self.files.tokenizer.decode(ids, skip_special_tokens=True).encode())


def tokenizer_files(source: str | None, train: str) -> TokenizerFiles:
    """The tokenizer of `source`, or one trained on the text of `train`.

    Args:
        source: a tokenizer.json or a directory with one.
        train: text, as `fastbrain.tokens.prepare` takes it.

    Raises:
        InvalidConfig: the tokenizer has no token that could end a text.
        Io, Serde: it cannot be read.
        EmptyDataset, InvalidDataset: there is no text to train on.
    """
    if source is None:
        trained = train_tokenizer(texts(train), VOCABULARY)
        return TokenizerFiles(trained, END_OF_TEXT, PAD)
    try:
        return TokenizerFiles.read(source)
    except InvalidConfig as error:
        raise InvalidConfig(f"data.tokenizer: {error}") from error


def _record(files: TokenizerFiles) -> dict[str, Any]:
    return {
        "eos": files.eos,
        "pad": files.pad,
        "bos": files.bos,
        "chat_template": files.chat_template,
        "ends": list(files.ends),
    }
