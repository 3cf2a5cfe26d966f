"""A model as a directory that transformers loads, written whole or not at all.

Tensors are brought into the class's layout and type one at a time, as they are written, so that a
model is never in memory twice.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastbrain import atomic
from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats import hf_layout as layouts
from fastbrain.formats.binary import require_exportable
from fastbrain.formats.hf_config import export_config
from fastbrain.formats.hf_files import INDEX, SINGLE
from fastbrain.formats.hf_layout import Form, Stored, layout, to_stored
from fastbrain.formats.huggingface import documents, json_bytes
from fastbrain.formats.safetensors_file import pieces as safetensors_pieces
from fastbrain.formats.whole_directory import write_whole
from fastbrain.tokens.tokenizer_files import TokenizerFiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OWN = "own"
# what we write, and what transformers writes beside it: nothing of a run, and nobody's notes
_KNOWN = re.compile(
    r"(generation_|tokenizer_|special_tokens_)?(config|map)\.json|tokenizer\.json|"
    r"chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
ARCHS = ("auto", *layouts.EXPORTED, OWN)


def write_directory(
    out: atomic.StrPath,
    config: TransformerConfig,
    weights: Sequence[tuple[str, Tensor]],
    *,
    arch: str = "auto",
    dtype: str = "float32",
    files: TokenizerFiles | None = None,
    max_shard_bytes: int = 5_000_000_000,
    force: bool = False,
) -> Path:
    """Write a Hugging Face directory durably: it is there whole, or what was there still is.

    Args:
        out: the directory to make.
        config: the model's shape, without adapters: merge those first.
        weights: (name, matrix) of every tensor of `transformer.pieces(config)`, in that order;
            FP32, on any device.
        arch: a class of transformers: `llama` for a dense model, `ernie4_5_moe` or `qwen2_moe`
            for a mixture of experts; `auto` is a `llama` or an `ernie4_5_moe`. `own` is the layout
            of training checkpoints, which holds any model, and which only fastbrain loads where
            there are experts.
        dtype: `float32`, or `bfloat16` for files of half the size.
        files: the tokenizer to put beside it.
        max_shard_bytes: where the weights have more, they are cut into files of at most so many;
            a tensor is never cut.
        force: replace the directory of a model at `out`.

    Returns:
        The directory, links followed.

    Raises:
        InvalidConfig: `arch` cannot hold the model, `out` exists, the tokenizer has more tokens
            than the model, or a weight is not a finite number.
        Io: a file cannot be written.
    """
    if config.lora is not None:
        raise InvalidConfig(
            "this model has adapters, for which no class of transformers has a place; merge them "
            "into the weights first (merge_lora)"
        )
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; it must be {' or '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise InvalidConfig(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if files is not None and files.size > config.vocab_size:
        raise InvalidConfig(
            f"the tokenizer has {files.size} tokens, but the model's vocab_size is "
            f"{config.vocab_size}; give the tokenizer that the model was trained with"
        )
    arch = resolved(config, arch)
    if (
        arch in (layouts.ERNIE, layouts.QWEN2)
        and config.d_model != config.n_heads * config.head_dim
    ):
        warnings.warn(
            f"head_dim is {config.head_dim}, and not d_model / n_heads: transformers reads it in "
            f"a {arch}, but other programs may not",
            stacklevel=2,
        )
    described = export_config(config, arch, dtype=dtype)
    texts = documents(described, files, config.max_seq_len)
    source = _Weights(config, dict(weights), DTYPES[dtype])

    def fill(directory: Path) -> None:
        source.write(directory, layout(config, arch), max_shard_bytes)
        for name, data in texts.items():
            atomic.write_new(directory / name, [data])

    return write_whole(out, fill, known=_KNOWN, force=force)


def resolved(config: TransformerConfig, arch: str) -> str:
    """The class of transformers that a model becomes.

    Raises:
        InvalidConfig: it cannot hold the model; says which can.
    """
    if arch not in ARCHS:
        raise InvalidConfig(f"arch is {arch!r}; known are {', '.join(ARCHS)}")
    if not config.moe_layers:
        if arch in ("auto", layouts.LLAMA, OWN):
            return layouts.LLAMA
        raise InvalidConfig(f"arch is {arch}, but this model has no experts; export it as llama")
    if arch == layouts.LLAMA:
        raise InvalidConfig(
            "arch is llama, but this model has experts; export it as ernie4_5_moe or qwen2_moe"
        )
    if arch == OWN:
        return layouts.OWN_MOE
    arch = layouts.ERNIE if arch == "auto" else arch
    first, last = config.moe_layers[0], config.moe_layers[-1]
    if arch == layouts.ERNIE and config.moe_layers != tuple(range(first, last + 1)):
        raise InvalidConfig(
            f"moe_layers is {list(config.moe_layers)}, and an ernie4_5_moe has experts in a range "
            "of layers without gaps; export it with arch qwen2_moe"
        )
    return arch


class _Weights:
    """The matrices of a model, turned into tensors of a class as they are asked for."""

    def __init__(
        self, config: TransformerConfig, views: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        self._head_dim = config.head_dim
        self._views = views
        self._dtype = dtype

    def write(self, directory: Path, tensors: Sequence[Stored], max_shard_bytes: int) -> None:
        """Write them all into a directory, and an index where one file does not hold them."""
        shards = self._cut(tensors, max_shard_bytes)
        if len(shards) == 1:
            atomic.write_new(directory / SINGLE, self._pieces(tensors))
            return
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            atomic.write_new(directory / name, self._pieces(shard))
            places |= {stored.name: name for stored in shard}
        size = sum(stored.values for stored in tensors) * self._dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": places}
        atomic.write_new(directory / INDEX, [json_bytes(index)])

    def _cut(self, tensors: Sequence[Stored], most: int) -> list[list[Stored]]:
        shards: list[list[Stored]] = [[]]
        size = 0
        for stored in tensors:
            nbytes = stored.values * self._dtype.itemsize
            if shards[-1] and size + nbytes > most:
                shards.append([])
                size = 0
            shards[-1].append(stored)
            size += nbytes
        return shards

    def _pieces(self, tensors: Sequence[Stored]) -> Iterator[memoryview]:
        """The bytes of a safetensors file, its tensors made one at a time."""
        # of one type, so they follow their header in the order of their names
        by_name = sorted(tensors, key=lambda stored: stored.name)
        shapes = {
            stored.name: torch.empty(stored.shape, dtype=self._dtype, device="meta")
            for stored in by_name
        }
        yield next(safetensors_pieces(shapes))
        for stored in by_name:
            _, *data = safetensors_pieces({stored.name: self._tensor(stored)})
            yield from data

    def _tensor(self, stored: Stored) -> Tensor:
        if stored.form is Form.ZERO:
            return torch.zeros(stored.shape, dtype=self._dtype)
        require_exportable(self._views[stored.piece], stored.name)
        made = to_stored(stored.form, self._views[stored.piece], self._head_dim)
        return made.to(self._dtype).reshape(stored.shape)
