"""Models out of GGUF files: opened and proved to fit first, then read a tensor at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fastbrain.atomic import StrPath
from fastbrain.config import TransformerConfig
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.binary import Reader, assign, require_finite
from fastbrain.formats.gguf_config import read_config
from fastbrain.formats.gguf_header import Entry, Header, gguf_package, read_header
from fastbrain.formats.gguf_layout import (
    LLAMA,
    ROPE_FACTORS,
    GgufTensor,
    fitting,
    layout,
)
from fastbrain.formats.gguf_tokenizer import read_tokenizer
from fastbrain.formats.hf_layout import half_split
from fastbrain.formats.names import listed
from fastbrain.tokens.tokenizer_files import TokenizerFiles

_MOST_FACTORS = 4_096


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file that holds a model which fastbrain can run.

    Attributes:
        path: of the file.
        config: what the file's keys say.
        header: all that it says.
    """

    path: StrPath
    config: TransformerConfig
    header: Header

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """Check a file's header, settings, and every tensor's name, type and shape.

        Dense models of the architecture `llama`, and mixtures of experts of `ernie4_5-moe` as
        `write_gguf` writes them.

        Raises:
            InvalidConfig: an architecture, a setting or a type of tensor that fastbrain does not
                have, or the gguf package is missing; names it.
            InvalidSnapshot: the file is damaged, or tensors are missing, left over or misshapen;
                names up to five of each.
            Io: the file is missing, unreadable or cut short.
            Serde: a text or value in its header is not what it should be.
        """
        gguf_package()
        header = read_header(path)
        factors = _factors(path, header)
        try:
            config = read_config(header, factors)
            _check(layout(config), header)
        except (InvalidConfig, InvalidSnapshot, Serde) as error:
            raise type(error)(f"{path}: {error}") from error
        return cls(path, config, header)

    def read_into(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Fill the tensors of a model of this configuration, in place.

        Args:
            weights: (Hugging Face name, 2-D view), as `TransformerLm.weights` gives them.

        Raises:
            InvalidConfig: the tensors are those of another configuration.
            InvalidSnapshot: a weight in the file is not a finite number.
            Io: the file cannot be read, or has changed.
        """
        views = fitting(self.config, weights)
        with Reader(self.path) as file:
            for name, tensor in layout(self.config).items():
                entry = self.header.tensors[name]
                file.seek(entry.start)
                for part in tensor.parts:
                    for rows in tensor.blocks():
                        block = _take(file, entry, rows.stop - rows.start, name)
                        values = half_split(block, len(block)) if tensor.heads else block
                        assign(views[part][rows], values.numpy())

    def tokenizer_files(self) -> TokenizerFiles | None:
        """The tokenizer in the file, or None where there is none.

        Raises:
            InvalidConfig: it is of a kind, or splits text in a way, that fastbrain does not have.
            InvalidSnapshot, Serde: its lists do not fit together.
        """
        try:
            return read_tokenizer(self.header.values, self.config.vocab_size)
        except FastBrainError as error:
            raise type(error)(f"{self.path}: {error}") from error


def _take(file: Reader, entry: Entry, rows: int, name: str) -> Tensor:
    """The next rows of a tensor as FP32."""
    gguf = gguf_package()
    data = np.frombuffer(file.take(rows * entry.row_bytes), np.uint8).reshape(rows, -1)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[entry.type.name])
    require_finite(values, file.path, name)
    # from_numpy wants memory that may be written
    return torch.from_numpy(np.require(values, np.float32, "W"))


def _factors(path: StrPath, header: Header) -> Tensor | None:
    entry = header.tensors.get(ROPE_FACTORS)
    if entry is None or header.values.get("general.architecture") != LLAMA:
        return None
    if len(entry.shape) != 1 or entry.shape[0] > _MOST_FACTORS or entry.type.name != "F32":
        raise InvalidSnapshot(
            f"{path}: {ROPE_FACTORS} must be a list of at most {_MOST_FACTORS} F32 values"
        )
    with Reader(path) as file:
        file.seek(entry.start)
        return _take(file, entry, 1, ROPE_FACTORS)[0]


def _check(expected: dict[str, GgufTensor], header: Header) -> None:
    found = header.tensors
    allowed = {ROPE_FACTORS} if header.values["general.architecture"] == LLAMA else set()
    extra = [name for name in found if name not in expected and name not in allowed]
    shapes = [
        f"{name} is {found[name].shape} and should be {tensor.shape}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    biases = ", some of them biases, which its layers do not have"
    differences = [
        *listed("it lacks {} tensors", [name for name in expected if name not in found]),
        *listed(
            "it has {} tensors that fastbrain has no place for"
            + (biases if any(name.endswith(".bias") for name in extra) else ""),
            extra,
        ),
        *listed("{} shapes differ", shapes),
    ]
    if differences:
        raise InvalidSnapshot(f"the tensors do not fit the keys: {'; '.join(differences)}")
