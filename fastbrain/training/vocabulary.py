"""The tokenizer of a run, kept inside the run directory, and its two special tokens.

What a file of ids means hangs on this one file, so every checkpoint carries a copy of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.tokens.prepare import load_tokenizer, texts, train_tokenizer
from fastbrain.tokens.tokenizer import tokenizer_sha256

VOCABULARY = 4_096

# a tokenizer learns nothing new from more text than this, and its training holds every word
TRAINING_CHARACTERS = 100_000_000

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, the file it is kept in, its digest, and what ends and fills a text."""

    tokenizer: Tokenizer
    path: Path
    sha256: str
    eos: str
    pad: str
    eos_id: int
    pad_id: int

    @classmethod
    def make(cls, source: str | None, train: str, target: Path) -> Self:
        """Load the tokenizer of `source`, or train one on the text of `train`; keep it in `target`.

        `source` is a tokenizer.json or a directory with one. The ending token is that of the
        tokenizer_config.json beside it, or else a usual one that the tokenizer knows.

        Raises:
            InvalidConfig: the tokenizer has no token that could end a text.
            Io, Serde: it cannot be read.
            EmptyDataset, InvalidDataset: there is no text to train on.
        """
        beside: dict[str, object] = {}
        if source is None:
            tokenizer = train_tokenizer(_some(texts(train)), VOCABULARY)
        else:
            tokenizer = load_tokenizer(source)
            folder = Path(source) if Path(source).is_dir() else Path(source).parent
            beside = _config(folder / "tokenizer_config.json")
        eos = _known(tokenizer, beside.get("eos_token"), _ENDS)
        if eos is None:
            raise InvalidConfig(
                f"data.tokenizer: {source} has no token to end a text with; it should name one as "
                f"eos_token in a tokenizer_config.json beside it, or know one of {', '.join(_ENDS)}"
            )
        pad = _known(tokenizer, beside.get("pad_token"), _PADS) or eos
        atomic.write_bytes(target, tokenizer.to_str(pretty=True).encode())
        return cls._of(tokenizer, target, eos, pad)

    @classmethod
    def open(cls, path: Path, eos: str, pad: str) -> Self:
        """Load one that `make` has kept."""
        return cls._of(load_tokenizer(path), path, eos, pad)

    @classmethod
    def _of(cls, tokenizer: Tokenizer, path: Path, eos: str, pad: str) -> Self:
        try:
            eos_id, pad_id = tokenizer.token_to_id(eos), tokenizer.token_to_id(pad)
        except (TypeError, UnicodeEncodeError):  # no text, or half of a pair of code units
            eos_id = pad_id = None
        if eos_id is None or pad_id is None:
            raise InvalidConfig(f"the tokenizer in {path} does not know {eos} and {pad}")
        return cls(tokenizer, path, tokenizer_sha256(tokenizer), eos, pad, eos_id, pad_id)

    @property
    def size(self) -> int:
        """The smallest vocabulary that holds every id, holes counted."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def text(self, ids: list[int]) -> str:
        """The text of ids, special tokens spelled out; unknown ids are nothing."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def bytes_of(self, ids: list[int]) -> int:
        """UTF-8 bytes of the text of ids, special tokens left out."""
        return len(self.tokenizer.decode(ids, skip_special_tokens=True).encode())


def _some(documents: Iterator[str]) -> Iterator[str]:
    read = 0
    for text in documents:
        yield text
        read += len(text)
        if read >= TRAINING_CHARACTERS:
            return


def _config(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _known(tokenizer: Tokenizer, named: object, usual: tuple[str, ...]) -> str | None:
    if isinstance(named, dict):
        named = named.get("content")
    for token in (named, *usual):
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            return token
    return None
