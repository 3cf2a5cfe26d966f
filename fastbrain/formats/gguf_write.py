"""Models into GGUF files that llama.cpp runs."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastbrain.atomic import StrPath, replacing
from fastbrain.config import Llama3Scaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats.binary import require_exportable, to_floats
from fastbrain.formats.gguf_config import config_keys
from fastbrain.formats.gguf_header import TYPES, Entry, gguf_package
from fastbrain.formats.gguf_layout import (
    ROPE_FACTORS,
    GgufTensor,
    architecture,
    fitting,
    layout,
)
from fastbrain.formats.gguf_rope import rope_factors
from fastbrain.formats.gguf_tokenizer import tokenizer_keys
from fastbrain.formats.hf_layout import interleaved
from fastbrain.tokens.sidecar import sweep
from fastbrain.tokens.tokenizer_files import TokenizerFiles

PRECISIONS = ("f32", "bf16", "q8_0")

_ALIGNMENT = 32
# how llama.cpp numbers what most of a file's tensors are in
_FILE_TYPES = {"f32": 0, "bf16": 32, "q8_0": 7}
_BLOCKS = {block.name: block for block in TYPES.values()}
# the largest value whose block has a finite scale
_Q8_LARGEST = 65_504.0 * 127


def write_gguf(
    out: StrPath,
    config: TransformerConfig,
    weights: Sequence[tuple[str, Tensor]],
    *,
    precision: str = "f32",
    files: TokenizerFiles | None = None,
    name: str = "",
    force: bool = False,
) -> None:
    """Write a model as one GGUF file, durably: it is there whole, or what was there still is.

    Dense models are of llama.cpp's architecture `llama`, mixtures of experts of `ernie4_5-moe`.
    Norms and routers are FP32 in every file; with `q8_0`, matrices whose rows are no whole blocks
    of 32 are BF16.

    Args:
        weights: (Hugging Face name, 2-D view), as `TransformerLm.weights` gives them, on any
            device, without adapters.
        precision: of the matrices: f32, bf16 or q8_0.
        files: the tokenizer; without one, llama.cpp runs the model on ids alone.
        name: what the model is called; the file's own name when empty.
        force: replace a file that is there.

    Raises:
        InvalidConfig: the file is there already, an unknown precision, a model or a tokenizer that
            a GGUF file cannot hold, or the gguf package is missing.
        Io: the file cannot be written.
    """
    assert config.lora is None, "adapters are merged before a model is written"
    if precision not in PRECISIONS:
        raise InvalidConfig(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if os.path.lexists(out) and not force:
        raise InvalidConfig(
            f"{os.fspath(out)} exists already; choose another path, or replace it with force"
        )
    gguf_package()
    keys = {
        "general.type": "model",
        "general.name": name or os.path.splitext(os.path.basename(out))[0],
        "general.file_type": _FILE_TYPES[precision],
        "general.quantization_version": 2,
        **config_keys(config),
        **tokenizer_keys(files, config.vocab_size),
    }
    views = fitting(config, weights)
    tensors = layout(config)
    kinds = {each: _kind(tensor, precision) for each, tensor in tensors.items()}
    if isinstance(config.rope_scaling, Llama3Scaling):
        factors = rope_factors(config, config.rope_scaling)
        tensors = {
            ROPE_FACTORS: GgufTensor(tuple(factors.shape), 0, True, [ROPE_FACTORS]),
            **tensors,
        }
        kinds[ROPE_FACTORS] = "F32"
        views[ROPE_FACTORS] = factors[None]
    shapes = {each: (kinds[each], tensor.shape) for each, tensor in tensors.items()}
    sweep(Path(os.path.realpath(out)))
    with replacing(out) as file:
        file.write(_header(architecture(config), keys, shapes))
        for each, tensor in tensors.items():
            size = 0
            for data in _packed(tensor, kinds[each], views, each):
                size += file.write(data)
            file.write(bytes(-size % _ALIGNMENT))


def _kind(tensor: GgufTensor, precision: str) -> str:
    if tensor.exact or precision == "f32":
        return "F32"
    if precision == "q8_0" and tensor.shape[-1] % _BLOCKS["Q8_0"].values == 0:
        return "Q8_0"
    return "BF16"


def _header(
    arch: str, keys: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> bytes:
    """Everything before the first tensor's bytes."""
    gguf = gguf_package()
    # its writer opens files itself and takes tensors whole; only what it says of them is wanted
    writer = gguf.GGUFWriter(None, arch)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, (kind, shape) in shapes.items():
        size = Entry(_BLOCKS[kind], shape, 0).row_bytes * int(np.prod(shape[:-1]))
        writer.add_tensor_info(
            name, shape, np.dtype(np.float32), size, gguf.GGMLQuantizationType[kind]
        )
    written = io.BytesIO()
    writer.fout = [written]
    writer.state = gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    data = written.getvalue()
    return data + bytes(-len(data) % _ALIGNMENT)


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            if not 0 <= value < 1 << 32:
                raise InvalidConfig(f"{key} would be {value}, more than a GGUF file can hold")
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _packed(
    tensor: GgufTensor, kind: str, views: Mapping[str, Tensor], name: str
) -> Iterator[bytes]:
    """The bytes of a tensor, some rows at a time."""
    gguf = gguf_package()
    for part in tensor.parts:
        for rows in tensor.blocks():
            block = views[part].detach()[rows]
            require_exportable(block, name)
            values = to_floats(interleaved(block, len(block)) if tensor.heads else block)
            if kind == "Q8_0":
                _check_range(values, name)
            packed: NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            yield packed.tobytes()


def _check_range(values: NDArray[Any], name: str) -> None:
    largest = float(np.abs(values).max())
    if not largest <= _Q8_LARGEST:
        raise InvalidConfig(
            f"{name} has a value of {largest}, which 8-bit blocks cannot hold; choose the "
            "precision f32 or bf16"
        )
