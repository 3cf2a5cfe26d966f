"""The header of a GGUF file, walked within bounds before anything in it is believed.

The gguf package maps a file and takes its counts and lengths at their word, and needs seconds for a
tokenizer of 50,000 tokens; so the header is read here. Nothing is allocated before the file is
known to hold it, and every tensor is known to lie inside the file.
"""

import struct
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from fastbrain.atomic import StrPath
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.binary import Reader
from fastbrain.formats.safetensors_file import MAX_TENSORS
from fastbrain.formats.strict_json import short

MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 10_000
MAX_ITEMS = 4 << 20  # of all arrays together: a vocabulary of 256k takes some 800k
_STEP_BYTES = 1 << 20
_MAGIC = b"GGUF"
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Block(NamedTuple):
    """How a type of tensor is stored: so many values in so many bytes."""

    name: str
    values: int
    bytes: int


# by the number that stands for the type in files
TYPES = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18),
    3: Block("Q4_1", 32, 20),
    8: Block("Q8_0", 32, 34),
    30: Block("BF16", 1, 2),
}


class Entry(NamedTuple):
    """A tensor in a GGUF file.

    Attributes:
        type: how its values are stored.
        shape: the length of a row last, as everywhere but in the file.
        start: its first byte, from the file's begin.
    """

    type: Block
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[-1] // self.type.values * self.type.bytes


class Header(NamedTuple):
    """What a GGUF file says of itself: values by key, and tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, Entry]


def gguf_package() -> ModuleType:
    """The gguf package.

    Raises:
        InvalidConfig: it is not installed.
    """
    try:
        return import_module("gguf")
    except ImportError as error:
        raise InvalidConfig(
            "GGUF files are read and written with the gguf package, which is not installed; "
            "pip install 'fastbrain[hf]'"
        ) from error


def read_header(path: StrPath) -> Header:
    """The header of a GGUF file, proved sound.

    Raises:
        Io: the file is missing, unreadable or cut short.
        Serde: a value is of no known type, or a text is not UTF-8.
        InvalidSnapshot: another kind of file, or counts, offsets and sizes do not agree.
        InvalidConfig: a tensor is of a type that fastbrain cannot read.
    """
    with Reader(path) as file:
        walk = _Walk(file)
        walk.check_magic()
        num_tensors, num_keys = walk.counts()
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = walk.text()
            if key in values:
                raise InvalidSnapshot(f"{file.path}: the key {short(key)} is there twice")
            values[key] = walk.value(key)
        found: dict[str, tuple[Block, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = walk.text()
            if name in found:
                raise InvalidSnapshot(f"{file.path}: the tensor {short(name)} is there twice")
            found[name] = walk.tensor(name)
        return Header(values, _placed(file, found, walk.at, values))


class _Walk:
    """A file's first bytes, read as far as they have been needed."""

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._data = bytearray()
        self._items = 0
        self.at = 0

    def check_magic(self) -> None:
        found = bytes(self._take(4))
        if found != _MAGIC:
            raise InvalidSnapshot(f"{self._file.path} begins with {found!r}, not with {_MAGIC!r}")
        [version] = self.unpack("I")
        if version not in (2, 3):
            big = ", perhaps because it is for big-endian machines" if version & 0xFFFF == 0 else ""
            raise InvalidSnapshot(
                f"{self._file.path} is a GGUF file of version {version}{big}; 2 and 3 can be read"
            )

    def counts(self) -> tuple[int, int]:
        num_tensors, num_keys = self.unpack("QQ")
        for count, most, what in (
            (num_tensors, MAX_TENSORS, "tensors"),
            (num_keys, MAX_KEYS, "keys"),
        ):
            if count > most:
                raise InvalidSnapshot(
                    f"{self._file.path} says that it has {count} {what}, more than the {most} "
                    "allowed; it is damaged"
                )
        return num_tensors, num_keys

    def unpack(self, kinds: str) -> tuple[Any, ...]:
        layout = f"<{kinds}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def text(self) -> str:
        [length] = self.unpack("Q")
        data = self._take(length)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise Serde(f"{self._file.path}: a text in its header is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        [kind] = self.unpack("I")
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise Serde(f"{self._file.path}: {short(key)} has a value of the unknown type {kind}")
        item, count = self.unpack("IQ")
        self._items += count
        if self._items > MAX_ITEMS:
            raise InvalidSnapshot(
                f"{self._file.path}: with {short(key)}, of {count} values, its lists have more "
                f"than the {MAX_ITEMS} allowed"
            )
        if item in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item]}"))
        if item != _STRING:
            raise Serde(f"{self._file.path}: {short(key)} is a list of the unknown type {item}")
        return [self.text() for _ in range(count)]

    def tensor(self, name: str) -> tuple[Block, tuple[int, ...], int]:
        where = f"{self._file.path}: tensor {short(name)}"
        [rank] = self.unpack("I")
        if not 1 <= rank <= 4:
            raise InvalidSnapshot(f"{where} has {rank} dimensions; there must be 1 to 4")
        sizes = self.unpack(f"{rank}Q")
        number, offset = self.unpack("IQ")
        if number not in TYPES:
            raise InvalidConfig(
                f"{where} is of type {_type_name(number)}, which fastbrain cannot read; it reads "
                f"{', '.join(block.name for block in TYPES.values())}"
            )
        if 0 in sizes or sizes[0] % TYPES[number].values:
            raise InvalidSnapshot(
                f"{where} of sizes {sizes} is not made of blocks of {TYPES[number].name}"
            )
        return TYPES[number], sizes[::-1], offset

    def _take(self, count: int) -> bytearray:
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            self._read_on()
        return self._data[start : self.at]

    def _read_on(self) -> None:
        self._file.require(self.at, f"its header goes on to {self.at}")
        if self.at > MAX_HEADER_BYTES:
            raise InvalidSnapshot(
                f"{self._file.path} has a header of more than {MAX_HEADER_BYTES} bytes"
            )
        # a megabyte at once, or what is asked for, or what there is
        end = min(max(self.at, len(self._data) + _STEP_BYTES), self._file.size)
        self._data += self._file.take(end - len(self._data))


def _placed(
    file: Reader,
    found: dict[str, tuple[Block, tuple[int, ...], int]],
    header_end: int,
    values: dict[str, Any],
) -> dict[str, Entry]:
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise InvalidSnapshot(
            f"{file.path}: general.alignment must be a power of two, not {short(alignment)}"
        )
    first = -(-header_end // alignment) * alignment
    placed = {}
    end, before = 0, "the header"
    for name, (block, shape, offset) in sorted(found.items(), key=lambda item: item[1][2]):
        if offset < end or offset % alignment:
            raise InvalidSnapshot(
                f"{file.path}: tensor {short(name)} starts inside {before} or is not aligned; the "
                "file is damaged"
            )
        entry = Entry(block, shape, first + offset)
        end, before = offset + entry.row_bytes, short(name)
        for size in shape[:-1]:
            end = offset + (end - offset) * size
        file.require(first + end, f"tensor {short(name)} ends at {first + end}")
        placed[name] = entry
    # in the order of the file's own list
    return {name: placed[name] for name in found}


def _type_name(number: int) -> str:
    try:
        return str(gguf_package().GGMLQuantizationType(number).name)
    except ValueError:
        return f"{number}, of no known name"
