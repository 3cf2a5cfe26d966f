"""16-bit ids, as nanoGPT writes them, into a token file of ours, a piece at a time."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fastbrain import atomic
from fastbrain.errors import EmptyDataset, InvalidConfig, InvalidDataset
from fastbrain.tokens.id_writer import IdWriter
from fastbrain.tokens.prepare import Prepared, tokenizer_sha256
from fastbrain.tokens.sidecar import FileState, Sidecar
from fastbrain.tokens.sniff import impostor

_PIECE = 1 << 20  # ids
_HEAD = 4_096


def import_u16(source: Path, target: Path, tokenizer: Tokenizer | None) -> Prepared:
    """Widen the ids of `source` to 32 bits in `target`, and record what they are beside it.

    Args:
        source: little-endian 16-bit ids without a header.
        target: replaced once all is well.
        tokenizer: the one that made them, where it is at hand: each id must be one of its.

    Raises:
        EmptyDataset: there are no ids.
        InvalidDataset: an odd number of bytes, recognized as something else, or an id that the
            tokenizer has not.
        InvalidConfig: `target` is `source`.
        Io: a file cannot be read or written.
    """
    if target.resolve() == source.resolve():
        raise InvalidConfig(f"{target} would be overwritten by its own tokens")
    end = None if tokenizer is None else 1 + max(tokenizer.get_vocab(True).values())
    with atomic.io_errors("read", source), source.open("rb") as file:
        head = file.read(_HEAD)
        _check(source, source.stat().st_size, head)
        file.seek(0)
        with atomic.replacing(target) as out:
            writer = IdWriter(out)
            while data := file.read(2 * _PIECE):
                if len(data) % 2:
                    raise InvalidDataset(f"{source} changed while it was read")
                ids = np.frombuffer(data, "<u2").astype(np.uint32)
                if end is not None and int(ids.max()) >= end:
                    at = int(np.argmax(ids >= end))
                    raise InvalidDataset(
                        f"{source} has the id {ids[at]} at position {writer.tokens + at}, and the "
                        f"tokenizer's ids are 0 to {end - 1}: another one made it"
                    )
                writer.add(ids)
    made_by = None if tokenizer is None else tokenizer_sha256(tokenizer)
    record = Sidecar(
        tokens=writer.tokens,
        max_id=writer.max_id,
        sha256=writer.sha256(),
        tokenizer_sha256=made_by,
        file=FileState.of(target, target.name, writer.sha256()),
    )
    record.write(target)
    return Prepared(
        target, writer.tokens, writer.max_id, writer.sha256(), made_by, None, None, None
    )


def _check(source: Path, size: int, head: bytes) -> None:
    if size == 0:
        raise EmptyDataset(f"{source} is empty")
    if size % 2:
        raise InvalidDataset(f"{source} has {size} bytes, and 16-bit ids are 2 bytes each")
    words = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    if len(words) >= 8 and not words[:, 1].any() and words[:, 0].any():
        raise InvalidDataset(
            f"{source} looks like 32-bit ids: it can be used as it is, without --import-u16"
        )
    found = impostor([head])
    if found and not found[0].startswith("16-bit"):
        raise InvalidDataset(f"{source} looks like {found[0]}, not like 16-bit ids; {found[1]}")
