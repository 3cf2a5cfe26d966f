"""What a file that was opened as token ids really is, told from a few blocks of its bytes.

A file of ids has no header, so anything opens as one and trains to nonsense. Only what is
recognized beyond doubt is named: plausible ids, and ids that are merely large, pass. All rules
rest on one fact: no vocabulary comes near 2**24, and each impostor, read as 32-bit ids, does.
"""

import codecs

import numpy as np
import numpy.typing as npt

_NO_VOCABULARY = 1 << 24
_ENCODE = "encode it first, with `fastbrain.tokens.prepare` or TokenFile.write"
_UNPACK = "unpack it first"
_MAGIC = {
    b"\x1f\x8b\x08": ("a gzip archive", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", _UNPACK),
    b"PK\x03\x04": ("a zip archive (as .npz and .pt files are)", _UNPACK),
    b"PAR1": ("a parquet table", "prepare it first: fastbrain prepare"),
    b"RBWTS001": ("the weights of a model", "load them with TransformerLm.load_bin"),
    b"RBOPT001": ("the optimizer state of a model", "see TransformerLm.load_optimizer_state"),
    b"\x93NUMPY": ("a numpy .npy file", "load it with np.load and pass it to TokenFile.write"),
}
_PRINTABLE = np.zeros(256, bool)
_PRINTABLE[[9, 10, 12, 13, *range(32, 127)]] = True


def impostor(blocks: list[bytes]) -> tuple[str, str] | None:
    """What the file looks like and what to do about it, or None if it may well be token ids.

    `blocks` are some of its bytes, the first its beginning, each at a multiple of four.
    """
    head = blocks[0]
    ids = np.concatenate([np.frombuffer(b[: len(b) // 4 * 4], "<u4") for b in blocks])
    if _is_int64(ids):
        way_out = "write np.fromfile(path, np.int64) again with TokenFile.write"
        return "64-bit ids, as numpy writes them", way_out
    if len(ids) == 0 or int(ids.max()) < 1 << 20:
        return None
    if int(ids.max()) >= _NO_VOCABULARY:
        for magic, found in _MAGIC.items():
            if head.startswith(magic):
                return found
        if _is_utf16(head):
            return "UTF-16 text", f"save it as UTF-8 and {_ENCODE}"
        if _is_text(head):
            if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                return "JSON lines", "encode them first, with TokenFile.write_jsonl"
            return "text", _ENCODE
        if _is_big_endian(ids):
            way_out = "write np.fromfile(path, '>u4') again with TokenFile.write"
            return "ids in big-endian byte order", way_out
    elif _is_utf16(head):
        return "UTF-16 text", f"save it as UTF-8 and {_ENCODE}"
    if _is_u16(ids):
        way_out = "write np.fromfile(path, np.uint16) again with TokenFile.write"
        return "16-bit ids, as nanoGPT writes them", way_out
    return None


def _is_text(head: bytes) -> bool:
    if b"\0" in head:
        return False
    codes = np.frombuffer(head, np.uint8)
    if _PRINTABLE[codes].mean() >= 0.8:  # ASCII in the main, in whatever encoding the rest is
        return True
    try:
        # not final: the block may end within a character
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return _readable(text)


def _is_utf16(head: bytes) -> bool:
    if len(head) < 16:
        return False
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return _readable(codecs.getincrementaldecoder("utf-16")().decode(head))
        except UnicodeDecodeError:
            return False
    codes = np.frombuffer(head[: len(head) // 2 * 2], np.uint8).reshape(-1, 2)
    return any(
        bool((codes[:, 1 - low] == 0).mean() >= 0.95 and _PRINTABLE[codes[:, low]].mean() >= 0.95)
        for low in (0, 1)
    )


def _readable(text: str) -> bool:
    good = sum(c.isprintable() or c.isspace() for c in text)
    return good >= 0.95 * len(text)


def _is_big_endian(ids: npt.NDArray[np.uint32]) -> bool:
    """Ids below 2**24 with their bytes turned round are multiples of 256, however large."""
    return bool(np.count_nonzero(ids) >= 4 and np.all(ids & np.uint32(0xFF) == 0))


def _is_int64(ids: npt.NDArray[np.uint32]) -> bool:
    """Every second number is 0, and the others are many: no text alternates so.

    A few documents of one token each, with separators of id 0 between them, do.
    """
    even, odd = ids[: len(ids) // 2 * 2].reshape(-1, 2).T
    many = np.count_nonzero(even) >= 0.5 * len(even) and len(np.unique(even)) >= 64
    return bool(len(odd) >= 256 and not odd.any() and many)


def _is_u16(ids: npt.NDArray[np.uint32]) -> bool:
    """Both halves of every id are drawn from the same small numbers.

    That the halves leave the top of their 16 bits empty has to be out of reach of chance, were
    they halves of real 32-bit numbers; that they look alike sets them off from two-part ids.
    """
    low, high = ids & np.uint32(0xFFFF), ids >> np.uint32(16)
    tops = sorted((int(low.max()), int(high.max())))
    by_chance = ((tops[1] + 1) / 65536) ** (2 * len(ids))
    many = len(np.unique(high)) >= 8 and np.count_nonzero(high) >= len(ids) / 2
    return bool(len(ids) >= 16 and many and 2 * tops[0] >= tops[1] and by_chance < 1e-6)
