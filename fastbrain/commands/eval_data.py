"""What `fastbrain eval` scores: a token file where it lies, or text made into one for the while."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.tokens import TokenFile
from fastbrain.tokens.prepare import prepare
from fastbrain.tokens.sidecar import Sidecar
from fastbrain.tokens.tokenizer import tokenizer_sha256
from fastbrain.tokens.tokenizer_files import TokenizerFiles

_PIECE = 1 << 16  # ids turned into text at once


class Data(NamedTuple):
    """Tokens to score, and the UTF-8 bytes of their text; None where nothing tells them."""

    tokens: TokenFile
    text_bytes: int | None


@contextmanager
def opened(
    source: Path, files: TokenizerFiles | None, field: str, max_tokens: int | None
) -> Iterator[Data]:
    """The first `max_tokens` tokens of `source`, or all; what was made for them goes at the end.

    Raises:
        InvalidConfig: text for a model without a tokenizer, or nothing that holds text.
        InvalidDataset: bad text, or tokens that another tokenizer made.
        EmptyDataset, Io: there is none, or it cannot be read.
    """
    if source.suffix == ".bin":
        with TokenFile.open(source, 0) as whole:
            yield _first(whole, _recorded_bytes(source, files), files, max_tokens)
        return
    if files is None:
        raise InvalidConfig(
            f"{source} is text, and the model has no tokenizer beside it: name one with "
            "--tokenizer, or give a token file, .bin"
        )
    with tempfile.TemporaryDirectory(prefix="fastbrain-eval-") as folder:
        target = Path(folder) / "tokens.bin"
        made = prepare(source, target, files.tokenizer, field, separator=files.eos_id)
        with TokenFile.open(target, 0) as whole:
            yield _first(whole, made.text_bytes, files, max_tokens)


def _recorded_bytes(path: Path, files: TokenizerFiles | None) -> int | None:
    record = Sidecar.read(path)
    if record is None or record.file.again(path) is None:
        return None
    if files is not None and record.tokenizer_sha256 is not None:
        ours = tokenizer_sha256(files.tokenizer)
        if record.tokenizer_sha256 != ours:
            raise InvalidDataset(
                f"{path} was made by the tokenizer {record.tokenizer_sha256}, and the model's is "
                f"{ours}: prepare the text with that one"
            )
    return record.text_bytes


def _first(
    whole: TokenFile, text_bytes: int | None, files: TokenizerFiles | None, most: int | None
) -> Data:
    tokens = whole
    if most is not None and most < whole.tokens():
        tokens, text_bytes = TokenFile.open(whole.path, 0, (0, most)), None
    if text_bytes is None and files is not None:
        text_bytes = _decoded_bytes(tokens, files.tokenizer)
    return Data(tokens, text_bytes)


def _decoded_bytes(tokens: TokenFile, tokenizer: Tokenizer) -> int:
    """Bytes of the text that ids stand for, special tokens left out.

    A character cut by the end of a piece counts as the mark that stands for it.
    """
    found = 0
    for start in range(0, tokens.tokens(), _PIECE):
        ids = tokens.read(start, min(_PIECE, tokens.tokens() - start)).tolist()
        found += len(tokenizer.decode(ids, skip_special_tokens=True).encode())
    return found
