"""Files of tensors, told from their headers: .rbw, .opt and safetensors. No value is read."""

import math
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fastbrain.commands.inspect_finding import Finding, TensorRow, clean, model_facts
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot
from fastbrain.formats import opt, rbl, rbw
from fastbrain.formats.binary import Reader
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.header import optimizer_object
from fastbrain.formats.safetensors_file import MAX_TENSORS, Entry, check_safetensors_header
from fastbrain.precision import Precision
from fastbrain.transformer import pieces

_NO_CHECKSUM = "; the format has no checksum of its values"


def weights(path: Path) -> Finding:
    """A weights file of the reference format."""
    found = Finding("weights of the reference format (.rbw)")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            header = rbw.read_header(path)
    except FastBrainError as error:
        return found.damaged(error)
    config, precision = header.config, header.precision
    adapter = {} if config.lora is None else {"adapter": vars(config.lora)}
    [(optimizer, values)] = optimizer_object(header.optimizer).items()
    found.what += f", {precision}"
    found.whole = True
    found.checked = f"its header, every tensor's shape and its size{_NO_CHECKSUM}"
    dtype = "F32" if precision is Precision.F32 else "Q8, a scale per row"
    rows = [TensorRow(each.name, (each.rows, each.cols), dtype) for each in pieces(config)]
    found.facts = {
        **model_facts(config),
        **adapter,
        "precision": dtype,
        "step": header.optimizer_step,
        "optimizer": {"kind": optimizer, **values},
        "tensor count": len(rows),
    }
    found.tensors = rows
    found.notes = [str(each.message) for each in caught]
    return found


def moments(path: Path) -> Finding:
    """An optimizer state of the reference format."""
    found = Finding("optimizer state of the reference format (.opt), F32")
    try:
        step, rows, rest = _opt_tensors(path)
    except FastBrainError as error:
        return found.damaged(error)
    found.whole = True
    found.checked = f"the shapes it names and its size{_NO_CHECKSUM}"
    found.facts = {
        "parameters": {"with moments": sum(each.shape[0] * each.shape[1] for each in rows)},
        "precision": "F32, two moments each",
        "step": step,
        "tensor count": len(rows),
    }
    found.tensors = rows
    found.notes.append("which optimizer it belongs to is not recorded in this format")
    if rest:
        found.notes.append(f"the {rest} bytes after the last tensor are ignored")
    return found


def adapters(path: Path) -> Finding:
    """The adapters of a model, in the reference format."""
    found = Finding("LoRA adapters of the reference format (.rbl), F32")
    try:
        with Reader(path) as file:
            lora = rbl.take_settings(file)
            [count] = file.numbers(1)
            rows = _rows(file, count, 4, "F32")
            rest = file.size - file.tell()
    except FastBrainError as error:
        return found.damaged(error)
    found.whole = True
    found.checked = f"its header, the shapes it names and its size{_NO_CHECKSUM}"
    found.facts = {
        "adapter": vars(lora),
        "parameters": {"total": sum(each.shape[0] * each.shape[1] for each in rows)},
        "precision": "F32",
        "tensor count": len(rows),
    }
    found.tensors = rows
    found.notes.append("which model it belongs to is not recorded in this format")
    if rest:
        found.notes.append(f"the {rest} bytes after the last tensor are ignored")
    return found


def _opt_tensors(path: Path) -> tuple[int, list[TensorRow], int]:
    with Reader(path) as file:
        file.magic(opt.MAGIC)
        count, step = file.numbers(2)
        if step >= 2**63:
            raise InvalidSnapshot(f"{file.path} is of {step} updates; it is damaged")
        rows = _rows(file, count, 8, "F32 x 2")
        return step, rows, file.size - file.tell()


def _rows(file: Reader, count: int, item: int, dtype: str) -> list[TensorRow]:
    """Shapes of tensors that follow each other, of `item` bytes a value."""
    if count > MAX_TENSORS:
        raise InvalidSnapshot(f"{file.path} says that it holds {count} tensors; it is damaged")
    end = file.tell() + 16 * count
    file.require(end, f"{count} tensors need {end} and their values")
    rows = []
    for index in range(count):
        shape = file.numbers(2)
        end = file.tell() + item * shape[0] * shape[1]
        file.require(end, f"tensor {index} of {shape[0]} x {shape[1]} ends at {end}")
        file.seek(end)
        rows.append(TensorRow(f"tensor {index}", shape, dtype))
    return rows


def safetensors(path: Path) -> Finding:
    """A safetensors file: weights, or the optimizer state of a checkpoint."""
    found = Finding("a safetensors file")
    try:
        entries = check_safetensors_header(path)
        with safe_open(path, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
    except FastBrainError as error:
        return found.damaged(error)
    except (SafetensorError, OSError) as error:
        return found.damaged(f"{path}: {error}")
    found.whole = True
    found.checked = f"its header, every tensor's span and its size{_NO_CHECKSUM}"
    found.tensors = [TensorRow(name, each.shape, each.dtype) for name, each in entries.items()]
    found.facts = {
        "parameters": {"total": _values(entries)},
        "precision": ", ".join(Counter(each.dtype for each in entries.values())) or "none",
        "tensor count": len(entries),
    }
    if metadata:
        found.facts["metadata"] = {clean(key): clean(value) for key, value in metadata.items()}
    updates = entries.get("updates")
    if updates is not None and any(name.endswith(".moment1") for name in entries):
        found.what = "optimizer state of a checkpoint (safetensors)"
        first = {name: each for name, each in entries.items() if name.endswith(".moment1")}
        found.facts |= {"parameters": {"with moments": _values(first)}}
        found.facts |= {"step": _scalar(path, updates)}
    elif any(name.endswith("embed_tokens.weight") for name in entries):
        found.what = "weights of a model (safetensors)"
    return found


def gguf(path: Path) -> Finding:
    """A GGUF model, as far as fastbrain reads such."""
    found = Finding("a GGUF model")
    try:
        model = GgufModel.open(path)
    except InvalidConfig as error:
        # another architecture, or the package that reads them is not there: that is no damage
        found.notes.append(str(error))
        found.checked = "it was not read"
        return found
    except FastBrainError as error:
        return found.damaged(error)
    found.whole, found.checked = True, f"its header and every tensor's span{_NO_CHECKSUM}"
    found.facts = {**model_facts(model.config)}
    return found


def _values(entries: dict[str, Entry]) -> int:
    # a product without a 0 is no more than the bytes of the file; one with it may take minutes
    return sum(0 if 0 in each.shape else math.prod(each.shape) for each in entries.values())


def _scalar(path: Path, entry: Entry) -> Any:
    if entry.dtype != "I64" or entry.end - entry.start != 8:
        return None
    with Reader(path) as file:
        file.seek(entry.start)
        return struct.unpack("<q", file.take(8))[0]
