"""A safetensors file is proved sound before its header is believed."""

import errno
import json
import os
import re
import stat
import struct

import pytest
import torch
from golden import refused_at_once
from safetensors import safe_open
from safetensors.torch import save_file

from fastbrain import atomic
from fastbrain.errors import InvalidSnapshot, Io, Serde
from fastbrain.formats import safetensors_file
from fastbrain.formats.safetensors_file import (
    check_safetensors_header,
    read_tensors,
    write_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def made(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def views():
    return {"a": torch.full((2, 3), 9.0), "b": torch.full((4,), 9.0)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def file(path):
    write_tensors(path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)})
    return path


def test_tensors_survive(file):
    found = views()
    read_tensors(file, found)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["b"], torch.ones(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives(path, dtype):
    truth = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    write_tensors(path, {"x": truth, "nothing": truth[:0], "scalar": truth[0, 1].clone()})
    found = {
        "x": torch.zeros_like(truth),
        "nothing": truth[:0],
        "scalar": torch.zeros_like(truth[0, 0]),
    }
    read_tensors(path, found)
    assert torch.equal(found["x"], truth)
    assert found["scalar"] == 1


def test_the_library_reads_what_we_write_and_finds_where_it_lies(file):
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        truth = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    data = file.read_bytes()
    found = check_safetensors_header(file)
    assert set(found) == set(truth)
    for name, (dtype, shape, start, end) in found.items():
        assert (dtype, shape) == ("F32", tuple(truth[name].shape))
        assert data[start:end] == truth[name].numpy().tobytes()


def test_a_file_is_that_of_the_library(path, tmp_path):
    """Byte by byte, so that whatever reads one reads the other."""
    kinds = (*DTYPES, torch.float64, torch.int32, torch.int16, torch.int8)
    tensors = {f"x{i}": torch.ones(i % 3 + 1, 3).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"\u00e9": torch.zeros(3), "a": torch.tensor(7), "none": torch.zeros(0, 2)}
    tensors["large"] = torch.randn(3_000, 1_001)  # more than two pieces, the last one short
    for metadata in ({"format": "pt"}, None):
        save_file(tensors, tmp_path / "theirs", metadata=metadata)
        write_tensors(path, tensors, metadata or {})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_views_of_one_storage_are_written_and_filled(path):
    fused = torch.arange(12.0).reshape(4, 3)
    parts = {"q": fused[:2], "k": fused[2:3], "v": fused[3:], "turned": torch.ones(2, 3).T}
    write_tensors(path, parts)
    again = torch.zeros(4, 3)
    read_tensors(
        path, {"q": again[:2], "k": again[2:3], "v": again[3:], "turned": torch.ones(3, 2)}
    )
    assert torch.equal(again, fused)


def test_a_parameter_is_written_and_filled(path):
    parameter = torch.nn.Parameter(torch.arange(3.0))
    write_tensors(path, {"x": parameter})
    other = torch.nn.Parameter(torch.zeros(3))
    read_tensors(path, {"x": other})
    assert torch.equal(parameter, other)


def test_a_file_has_the_mode_of_the_umask(path):
    before = os.umask(0o022)
    try:
        write_tensors(path, {"x": torch.zeros(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_is_flushed_before_it_has_its_name(path, monkeypatch):
    order = []
    for name in ("fsync", "rename", "sync_dir"):
        real = getattr(atomic, name)
        monkeypatch.setattr(atomic, name, lambda *a, n=name, f=real: (order.append(n), f(*a)))
    write_tensors(path, {"x": torch.zeros(3)})
    assert order == ["fsync", "rename", "sync_dir"]


def test_a_full_disk_is_told_and_the_old_file_stays(file, monkeypatch):
    before = file.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, "write", full)
    with pytest.raises(
        Io, match=f"^cannot write {file}: No space left on device; free some"
    ) as caught:
        write_tensors(file, {"x": torch.zeros(3)})
    assert caught.value.errno == errno.ENOSPC
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_other_names_are_listed_up_to_five_and_nothing_is_written(file):
    found = {f"layers.{i}": torch.zeros(1) for i in range(7)}
    refused(
        file,
        found,
        InvalidSnapshot,
        f"{file} does not fit this model: the file lacks 7 of its tensors: layers.0, layers.1, "
        "layers.2, layers.3, layers.4, and 2 more; "
        "the file has 2 tensors that the model lacks: a, b",
    )


def test_other_shapes_and_dtypes_name_both(file):
    found = {"a": torch.full((3, 2), 9.0), "b": torch.full((4,), 9.0, dtype=torch.bfloat16)}
    refused(
        file,
        found,
        InvalidSnapshot,
        f"{file} does not fit this model: 1 shapes differ: a is (2, 3) in the file and (3, 2) in "
        "the model; 1 dtypes differ: b is F32 in the file and BF16 in the model",
    )


def test_a_file_cut_anywhere_is_refused(file):
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        refused(file, views(), Io, f"{file} is cut short: it has {size} bytes, but ")


def test_a_file_that_is_missing_is_told(path):
    refused(path, views(), Io, f"cannot read {path}: No such file or directory; check the path")


def test_bytes_past_the_end_are_refused(file):
    size = file.stat().st_size
    with file.open("ab") as grown:
        grown.write(b"1")
    refused(
        file,
        views(),
        InvalidSnapshot,
        f"{file} has {size + 1} bytes, but its header implies {size}; the file is damaged",
    )


A = entry([2], 0, 8)


@pytest.mark.parametrize(
    ("header", "kind", "message"),
    [
        (b"{", Serde, "in its header, this is not valid JSON: "),
        (b"[]", Serde, "in its header, there must be an object, not []"),
        (b'{"a":{},"a":{}}', Serde, "in its header, its JSON has the key 'a' twice in one object"),
        (b"[" * 100_000, Serde, "in its header, its JSON is nested deeper than 8 levels"),
        (b'{"a":' * 100_000, Serde, "in its header, its JSON is nested deeper than 8 levels"),
        (b'{"' + b"[" * 3_000_000, Serde, "in its header, this is not valid JSON: "),
        (
            {"a": 1},
            Serde,
            "in its header, tensor 'a' must have dtype, shape and data_offsets, not 1",
        ),
        ({"a": A | {"x": 1}}, Serde, "in its header, tensor 'a' must have dtype, shape and data_"),
        (
            {"a": A | {"dtype": "F99"}},
            InvalidSnapshot,
            "in its header, tensor 'a' has dtype 'F99'; ",
        ),
        (
            {"a": A | {"dtype": []}},
            InvalidSnapshot,
            "in its header, tensor 'a' has dtype []; known",
        ),
        (
            {"a": A | {"shape": [2.0]}},
            Serde,
            "tensor 'a' must have whole numbers as shape, not [2.0]",
        ),
        (
            {"a": A | {"shape": [-2]}},
            Serde,
            "tensor 'a' must have whole numbers as shape, not [-2]",
        ),
        (
            {"a": A | {"shape": [True]}},
            Serde,
            "tensor 'a' must have whole numbers as shape, not [T",
        ),
        ({"a": A | {"data_offsets": [8]}}, Serde, "tensor 'a' must have two data_offsets, not [8]"),
        (
            {"a": entry([2], 8, 0)},
            InvalidSnapshot,
            "of shape [2] and dtype F32 does not fill its -8 b",
        ),
        (
            {"a": entry([3], 0, 8)},
            InvalidSnapshot,
            "of shape [3] and dtype F32 does not fill its 8 by",
        ),
        ({"a": entry([2**63, 2], 0, 0)}, InvalidSnapshot, "does not fill its 0 bytes; the file is"),
        ({"a": entry([2**62], 0, 2**64)}, Io, "but its header implies 18446744073709"),
        (
            {"a": entry([2**62] * 100_000, 0, 8)},
            InvalidSnapshot,
            "does not fill its 8 bytes; the file",
        ),
        (
            {"a": A, "__metadata__": {"format": 1}},
            Serde,
            "__metadata__ must hold texts, not {'format'",
        ),
        ({"\ud800" * 500: 1}, Serde, "in its header, tensor '" + "\\ud800" * 12),
        ({"caf\u00e9": 1}, Serde, "in its header, tensor 'caf\\xe9' must have dtype, shape and"),
        (
            {"a": entry([2], 0, 8), "b": entry([10**9], 8, 8 + 4 * 10**9)},
            Io,
            "is cut short: it has ",
        ),
    ],
    ids=range(23),
)
def test_a_header_that_lies_is_refused_at_once(path, header, kind, message):
    made(path, header, bytes(8))
    refused_at_once(check_safetensors_header, path, kind, message)


@pytest.mark.parametrize(
    ("tensors", "name", "start", "before"),
    [
        ({"a": A, "b": A}, "b", 0, 8),
        ({"a": A, "b": entry([1], 4, 8)}, "b", 4, 8),
        ({"a": A, "b": entry([1], 12, 16)}, "b", 12, 8),
        ({"a": entry([2], 4, 12)}, "a", 4, 0),
    ],
    ids=["twice", "overlap", "gap", "gap-in-front"],
)
def test_tensors_that_do_not_lie_end_to_end_are_refused(path, tensors, name, start, before):
    data = 8 + len(json.dumps(tensors))
    made(path, tensors, bytes(16))
    refused_at_once(
        check_safetensors_header,
        path,
        InvalidSnapshot,
        f"{path}: tensor '{name}' starts at byte {data + start} of the file, but what is before it "
        f"ends at {data + before}; the file is damaged",
    )


def test_tensors_may_be_named_in_any_order(path):
    made(path, {"b": entry([1], 8, 12), "a": A, "z": entry([2**40, 0], 8, 8)}, bytes(12))
    data = path.stat().st_size - 12
    assert check_safetensors_header(path) == {
        "b": ("F32", (1,), data + 8, data + 12),
        "a": ("F32", (2,), data, data + 8),
        "z": ("F32", (2**40, 0), data + 8, data + 8),
    }


@pytest.mark.parametrize("length", [100_000_001, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_is_too_long_is_refused(path, length):
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    refused_at_once(
        check_safetensors_header,
        path,
        InvalidSnapshot,
        f"says that its header has {length} bytes, more than the",
    )


def test_a_million_tensors_are_counted_before_they_are_parsed(path):
    text = ",".join(
        f'"{i}":{{"dtype":"F32","shape":[],"data_offsets":[0,4]}}' for i in range(10**6)
    )
    made(path, f"{{{text}}}".encode())
    del text
    refused_at_once(
        check_safetensors_header,
        path,
        InvalidSnapshot,
        "names 1000000 tensors, more than the 50000 allowed",
    )


def test_names_are_counted_across_the_pieces_they_are_read_in(path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", 3)
    for padding in range(1 << 20, (1 << 20) + 150, 5):
        text = b'{"%s":' % (b"x" * (padding - 100))
        text += b',"y":'.join(json.dumps(A).encode() for _ in range(4)) + b"}"
        made(path, text)
        refused_at_once(
            check_safetensors_header,
            path,
            InvalidSnapshot,
            "names 4 tensors, more than the 3 allowed",
        )


def refused(path, found, kind, message):
    with pytest.raises(kind, match="^" + re.escape(message)):
        read_tensors(path, found)
    assert all((tensor == 9).all() or not tensor.any() for tensor in found.values())
