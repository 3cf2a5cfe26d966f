"""A tokenizer with what the files of Hugging Face say beside it: special tokens and template."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, Serde
from fastbrain.tokens.small_file import read_small
from fastbrain.tokens.tokenizer import load_tokenizer

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer and its special tokens.

    Attributes:
        tokenizer: text to ids and back.
        eos: the token that ends a text; the tokenizer knows it.
        pad: the token that fills a batch; `eos` where there is none.
        bos: the token that begins a text, where the tokenizer has one.
        chat_template: Jinja text that renders a conversation; None where there is none.
        ends: ids after any of which generation stops; `eos` first.
    """

    tokenizer: Tokenizer
    eos: str
    pad: str
    bos: str | None = None
    chat_template: str | None = None
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("eos", "pad", "bos"):
            token = getattr(self, name)
            if token is not None and _id(self.tokenizer, token) is None:
                raise InvalidConfig(f"{name} is {token!r}, which the tokenizer does not know")
        ends = (self.eos_id, *self.ends)
        object.__setattr__(self, "ends", tuple(dict.fromkeys(ends)))

    @classmethod
    def read(cls, source: atomic.StrPath) -> Self:
        """Those of a directory, or of a tokenizer.json and the files beside it.

        Where no file names the token that ends a text, a usual one that the tokenizer knows does.

        Raises:
            InvalidConfig: the tokenizer has no token that could end a text.
            Io: there is no tokenizer.json, or one of the files cannot be read.
            Serde: it holds no tokenizer, or another file is not what it should be; names it.
        """
        tokenizer = load_tokenizer(source)
        folder = Path(source) if os.path.isdir(source) else Path(source).parent
        config = _object(folder / "tokenizer_config.json")
        eos = _known(tokenizer, config.get("eos_token"), _ENDS)
        if eos is None:
            raise InvalidConfig(
                f"the tokenizer of {source} has no token to end a text with; it should name one as "
                f"eos_token in a tokenizer_config.json beside it, or know one of {', '.join(_ENDS)}"
            )
        return cls(
            tokenizer,
            eos,
            _known(tokenizer, config.get("pad_token"), _PADS) or eos,
            _known(tokenizer, config.get("bos_token"), ()),
            _template(config, folder),
            _ends(_object(folder / "generation_config.json")),
        )

    @property
    def eos_id(self) -> int:
        """The id of `eos`."""
        return _certain_id(self.tokenizer, self.eos)

    @property
    def pad_id(self) -> int:
        """The id of `pad`."""
        return _certain_id(self.tokenizer, self.pad)

    @property
    def size(self) -> int:
        """The smallest vocabulary that holds every id, holes counted."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())


def read_template(path: Path) -> str:
    """The text of a Jinja file.

    Raises:
        Io: it is missing, unreadable or no plain file.
        Serde: it is too large for a template, or not UTF-8.
    """
    try:
        return read_small(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise Serde(f"{path} is not UTF-8: {error}") from error


def _template(config: dict[str, Any], folder: Path) -> str | None:
    # newer versions of transformers write it to a file of its own
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_template(path)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {e.get("name"): e.get("template") for e in found if isinstance(e, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _ends(generation: dict[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return tuple(each for each in ids if type(each) is int and each >= 0)


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(read_small(path, _MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise Serde(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise Serde(f"{path} must hold an object")
    return found


def _known(tokenizer: Tokenizer, named: object, usual: tuple[str, ...]) -> str | None:
    if isinstance(named, dict):
        named = named.get("content")
    for token in (named, *usual):
        if isinstance(token, str) and _id(tokenizer, token) is not None:
            return token
    return None


def _certain_id(tokenizer: Tokenizer, token: str) -> int:
    found = _id(tokenizer, token)
    assert found is not None
    return found


def _id(tokenizer: Tokenizer, token: str) -> int | None:
    try:
        found: int | None = tokenizer.token_to_id(token)
    except (TypeError, UnicodeEncodeError):  # no text, or half of a pair of code units
        return None
    return found
