"""A Hugging Face directory opened for reading: another program's model, or one of our own.

Names, shapes, types and settings are all checked when it is opened, and so is every value that
must be zero; nothing is allocated for the model before. Values are then copied a few megabytes at a
time. Nothing in a directory is ever unpickled or run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fastbrain.atomic import StrPath
from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.binary import require_finite
from fastbrain.formats.hf_files import (
    MAX_CONFIG_BYTES,
    Place,
    blocks,
    find_tensors,
    is_readable,
    json_file,
)
from fastbrain.formats.hf_layout import Form, Stored, from_stored, layout
from fastbrain.formats.hf_settings import described
from fastbrain.formats.names import listed
from fastbrain.formats.safetensors_file import MAX_TENSORS
from fastbrain.formats.strict_json import short

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# a table of frequencies that old versions of transformers saved; it follows from the settings
_PASSED_OVER = "rotary_emb.inv_freq"


class Directory:
    """A directory that holds a model fastbrain can run; `open` makes one.

    Attributes:
        path: of the directory.
        config: the model's shape.
        arch: its `model_type`.
    """

    path: Path
    config: TransformerConfig
    arch: str

    def __init__(
        self,
        path: Path,
        config: TransformerConfig,
        arch: str,
        tensors: Sequence[tuple[Stored, Place]],
    ) -> None:
        self.path, self.config, self.arch = path, config, arch
        self._tensors = tensors

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """Check everything about a directory but the weights' own values.

        Raises:
            InvalidConfig: it describes a model that fastbrain cannot run, or holds it in a format
                that it does not read; names the setting and its value.
            InvalidSnapshot: a tensor is missing, left over or of another shape, or is not zero
                where it must be; names it.
            Serde: a file is not JSON, or lacks a key.
            Io: a file is missing, unreadable or cut short.
        """
        path = Path(path)
        config_file = path / "config.json"
        if (path / "adapter_config.json").exists() and not config_file.exists():
            raise InvalidConfig(
                f"{path} holds an adapter without its model; merge the two with the package that "
                "made it (peft: merge_and_unload), and save the result"
            )
        settings = json_file(config_file, MAX_CONFIG_BYTES)
        try:
            config, arch = described(settings)
        except (InvalidConfig, Serde) as error:
            raise type(error)(f"{config_file}: {error}") from error
        count = _least_tensors(config)
        if count > MAX_TENSORS:
            raise InvalidConfig(
                f"{config_file} describes a model of {count} tensors, more than the {MAX_TENSORS} "
                "allowed"
            )
        found = find_tensors(path, count)
        tensors = _matched(path, layout(config, arch), found)
        if config.tie_embeddings and _HEAD in found:
            _require_equal(found[_HEAD], found[_EMBEDDING], config)
        return cls(path, config, arch, tensors)

    def read_into(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Copy every tensor into the matrix of its name.

        Args:
            weights: (name, matrix) of every tensor of `transformer.pieces(config)`; FP32, on any
                device.

        Raises:
            InvalidSnapshot: a weight in the file is not a finite number.
            Io: a file cannot be read, or became shorter.

        Some matrices may be written then: read into a fresh model, and drop it.
        """
        views = dict(weights)
        read = {stored.piece for stored, _ in self._tensors if stored.piece}
        assert read == views.keys(), read ^ views.keys()
        for stored, place in self._tensors:
            if not stored.piece:
                continue
            view = views[stored.piece]
            unit = self.config.head_dim if stored.form is Form.INTERLEAVED else 1
            for rows, values in blocks(place, view.shape[0], view.shape[1], unit):
                require_finite(values, place.file, stored.name)
                with torch.no_grad():
                    part = from_stored(stored.form, torch.from_numpy(values), unit)
                    view[rows].copy_(part)


def _least_tensors(config: TransformerConfig) -> int:
    # worked out, not listed: a file can name more layers than memory has room for
    moe = len(config.moe_layers)
    return 2 + 9 * (config.n_layers - moe) + (7 + 3 * config.num_experts) * moe


def _matched(
    path: Path, expected: Sequence[Stored], found: Mapping[str, Place]
) -> list[tuple[Stored, Place]]:
    """Every expected tensor with its place, or an error that names up to five of what is wrong."""
    names = {stored.name for stored in expected}
    extra = [
        name
        for name in found
        if name not in names and name != _HEAD and not name.endswith(_PASSED_OVER)
    ]
    missing = [stored.name for stored in expected if stored.name not in found]
    both = [stored for stored in expected if stored.name in found]
    misshapen = [
        f"{stored.name} is {list(found[stored.name].entry.shape)} and not {list(stored.shape)}"
        for stored in both
        if found[stored.name].entry.shape != stored.shape
    ]
    wrong = [
        *listed("it has {} tensors that such a model lacks", extra),
        *_why(extra),
        *listed("it lacks {} tensors", missing),
        *listed("{} have another shape", misshapen),
    ]
    if wrong:
        raise InvalidSnapshot(
            f"{path} does not hold the model that its config.json describes: {'; '.join(wrong)}"
        )
    names.add(_HEAD)
    for name, place in found.items():
        if name in names and not is_readable(place.entry):
            raise InvalidSnapshot(
                f"{place.file}: tensor {short(name)} has dtype {place.entry.dtype}; fastbrain "
                "reads F32, F16 and BF16"
            )
    for stored in both:
        if stored.form is Form.ZERO:
            _require_zero(found[stored.name], stored)
    return [(stored, found[stored.name]) for stored in expected]


def _why(extra: Sequence[str]) -> list[str]:
    if any(name.endswith(".bias") for name in extra):
        return ["fastbrain has no biases"]
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in extra):
        return ["fastbrain does not normalize queries and keys"]
    return []


def _require_zero(place: Place, stored: Stored) -> None:
    for _, values in blocks(place, stored.shape[0], stored.shape[1]):
        if values.any():
            raise InvalidSnapshot(
                f"{place.file}: {stored.name} must be all zeros, since fastbrain has no such "
                f"tensor, but {short(float(values[values != 0][0]))} is in it"
            )


def _require_equal(head: Place, embedding: Place, config: TransformerConfig) -> None:
    shape = (config.vocab_size, config.d_model)
    if head.entry.shape == shape:
        pairs = zip(blocks(head, *shape), blocks(embedding, *shape), strict=True)
        if all(np.array_equal(one.view("<u4"), two.view("<u4")) for (_, one), (_, two) in pairs):
            return
    raise InvalidSnapshot(
        f"{head.file} holds {_HEAD}, which differs from {_EMBEDDING}, but config.json says "
        "tie_word_embeddings true: one of the two is wrong"
    )
