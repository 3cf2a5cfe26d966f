"""Documents to ids: by a function, or by a `tokenizers.Tokenizer` in parallel and bounded memory.

A tokenizer's memory grows with the text it is given, by some 250 bytes for each byte, so a long
document is cut and its parts are encoded side by side. The cut is before a single space between
two letters, where a byte-level tokenizer begins a word whatever is around it, so the ids are those
of the whole; a tokenizer of which that is not sure gets the document in one piece.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.tokens.documents import Document
from fastbrain.tokens.ids import U32_END, Ids, check_range, integers

Tokenize: TypeAlias = Callable[[str], Ids] | Tokenizer
U32: TypeAlias = npt.NDArray[np.uint32]

BATCH = 1 << 19  # characters encoded at once, over all threads
_SAFE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Sequence"}
_PROBE = "It's  a 1st word, don't stop\nOnce more; \u00e9t\u00e9 \u0434\u043e\u043c 12 ab cd\t e f"


def encode(
    documents: Iterable[Document], tokenize: Tokenize, separator: int | None, batch: int = BATCH
) -> Iterator[U32]:
    """The ids of all documents, each followed by `separator` unless that is None.

    They come in arrays of any length; `batch`, in characters, changes how long, never which ids.
    A tokenizer's special tokens count as plain text, it adds none, and neither its truncation
    nor its padding applies; it is left as it was. InvalidDataset for a function's ids that are
    none, InvalidConfig for a separator that is no id.
    """
    if separator is not None and not 0 <= separator < U32_END:
        raise InvalidConfig(f"separator is {separator}; it must be an id below 2**32, or None")
    if isinstance(tokenize, Tokenizer):
        return _by_tokenizer(documents, plain(tokenize), separator, batch)
    return _by_function(documents, tokenize, separator)


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads all text as plain text and encodes every text whole and unpadded."""
    try:
        copy = Tokenizer.from_str(tokenizer.to_str())
    except Exception as error:  # the class that the package raises
        raise InvalidConfig(
            f"the tokenizer cannot be copied ({error}); pass its encoding as a function instead: "
            "lambda text: tokenizer.encode(text, add_special_tokens=False).ids"
        ) from error
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy


def _by_function(
    documents: Iterable[Document], tokenize: Callable[[str], Ids], separator: int | None
) -> Iterator[U32]:
    end = [] if separator is None else [separator]
    for document in documents:
        what = f"{document.place}: the ids that tokenize returned"
        ids = integers(tokenize("".join(document.pieces)), what, InvalidDataset)
        check_range(ids, U32_END, what, InvalidDataset)
        yield np.concatenate((ids.astype(np.uint32), np.array(end, np.uint32)))


def _by_tokenizer(
    documents: Iterable[Document], tokenizer: Tokenizer, separator: int | None, batch: int
) -> Iterator[U32]:
    texts_to_encode = parts(documents, cuts_exactly(tokenizer))
    while group := list(_up_to(texts_to_encode, batch)):
        texts = [text for text, _ in group]
        ids: list[int] = []
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for encoding, (_, is_last) in zip(encodings, group, strict=True):
            ids += encoding.ids
            if is_last and separator is not None:
                ids.append(separator)
        yield np.array(ids, np.uint32)


def _up_to(source: Iterator[tuple[str, bool]], batch: int) -> Iterator[tuple[str, bool]]:
    size = 0
    for part in source:
        yield part
        # a text costs something even if it is empty
        size += len(part[0]) + 16
        if size >= batch:
            return


def parts(documents: Iterable[Document], may_cut: bool) -> Iterator[tuple[str, bool]]:
    """Texts to encode on their own, each with whether it ends a document.

    Long documents come in several, cut between words, if `may_cut`.
    """
    for document in documents:
        held: list[str] = []
        before = ""
        for piece in document.pieces:
            at = _word_boundary(before, piece) if may_cut and held else None
            if at is not None:
                yield "".join([*held, piece[:at]]), False
                held, piece = [], piece[at:]
            held.append(piece)
            before = piece[-1:] or before
        yield "".join(held), True


def _word_boundary(before: str, piece: str) -> int | None:
    """Where in `piece`, which follows the character `before`, a text may be cut first."""
    text = before + piece
    at = text.find(" ", 1)
    while at >= 0:
        if text[at - 1].isalpha() and text[at + 1 : at + 2].isalpha():
            return at - len(before)
        at = text.find(" ", at + 1)
    return None


def cuts_exactly(tokenizer: Tokenizer) -> bool:
    """Whether a text cut before a single space between two letters has the ids of the whole."""
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    model, pre_tokenizer = spec["model"], spec["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    normalizer = spec["normalizer"] or {"type": "Sequence", "normalizers": []}
    normalizers = [normalizer, *normalizer.get("normalizers", [])]
    added = [t for t in spec["added_tokens"] if not t["special"]]
    return (
        not model.get("dropout")
        and steps[-1].get("type") == "ByteLevel"
        and all(step["type"] in _SAFE_NORMALIZERS for step in normalizers)
        # one that holds a space, or takes the space behind it, would be torn
        and not any(" " in token["content"] or token["rstrip"] for token in added)
        and _splits_alike(tokenizer)
    )


def _splits_alike(tokenizer: Tokenizer) -> bool:
    def split(text: str) -> list[str]:
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    cuts = [i for i, c in enumerate(_PROBE) if _word_boundary(_PROBE[:i], c + _PROBE[i + 1 :]) == 0]
    return all(split(_PROBE) == split(_PROBE[:i]) + split(_PROBE[i:]) for i in cuts)
