"""Optimizer state is the crate's to the byte, and loads whole or not at all."""

import errno
import hashlib
import os
import struct
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, golden_tensors

from fastbrain import atomic
from fastbrain.errors import InvalidSnapshot, Io
from fastbrain.formats import opt
from fastbrain.transformer import pieces


def golden_moments():
    """Half of the golden weights, and their squares."""
    return [(name, weights / 2, weights * weights) for name, weights in golden_tensors()]


def fresh(value=9.0):
    return [
        (p.name, torch.full((p.rows, p.cols), value), torch.full((p.rows, p.cols), value))
        for p in pieces(GOLDEN)
    ]


def untouched(moments, value=9.0):
    return all((m == value).all() for _, *both in moments for m in both)


@pytest.fixture
def file(tmp_path) -> Path:
    opt.write(tmp_path / "model.opt", 7, golden_moments())
    return tmp_path / "model.opt"


def test_golden_bytes(file):
    data = file.read_bytes()
    assert len(data) == 3_048
    assert hashlib.sha256(data).hexdigest().startswith("fe4f5346f8b017d3")


def test_moments_survive(file):
    moments = fresh()
    assert opt.read(file, moments) == 7
    for (name, *found), (_, *truth) in zip(moments, golden_moments(), strict=True):
        assert all(map(torch.equal, found, truth)), name


def test_moments_of_many_blocks_survive(tmp_path, monkeypatch):
    monkeypatch.setattr("fastbrain.formats.binary._BLOCK_BYTES", 40)
    opt.write(tmp_path / "model.opt", 7, golden_moments())
    moments = fresh()
    opt.read(tmp_path / "model.opt", moments)
    for (name, *found), (_, *truth) in zip(moments, golden_moments(), strict=True):
        assert all(map(torch.equal, found, truth)), name


def test_negated_matrices_turn_the_first_moment_of_what_has_rows(file):
    moments = fresh()
    opt.read(file, moments, negated_matrices=True)
    signs = set()
    for (name, first, second), (_, truth, square) in zip(moments, golden_moments(), strict=True):
        sign = 1 if first.shape[0] == 1 else -1
        signs.add(sign)
        assert torch.equal(first, sign * truth), name
        assert torch.equal(second, square), name
    assert signs == {1, -1}


def test_the_counter_is_64_bits_wide(tmp_path):
    opt.write(tmp_path / "model.opt", 2**40, golden_moments())
    assert opt.read(tmp_path / "model.opt", fresh()) == 2**40


def test_moments_in_fused_storage_are_written_and_filled(tmp_path, file):
    fused = [
        (name, torch.zeros(2, first.shape[0], 9)[:, :, : first.shape[1]])
        for name, first, _ in golden_moments()
    ]
    moments = [(name, both[0], both[1]) for name, both in fused]
    opt.read(file, moments)
    opt.write(tmp_path / "again.opt", 7, moments)
    assert (tmp_path / "again.opt").read_bytes() == file.read_bytes()


def test_a_file_of_another_kind_is_named(file):
    data = file.read_bytes()
    file.write_bytes(b"RBWTS001" + data[8:])
    refused(
        file,
        InvalidSnapshot,
        "begins with b'RBWTS001', not with b'RBOPT001': it is a weights file: load_bin reads it",
        separator=" ",
    )


@pytest.mark.parametrize("count", [0, 26, 28, 2**63])
def test_another_number_of_tensors_names_both(file, count):
    poke(file, 8, count)
    refused(
        file,
        InvalidSnapshot,
        f"holds {count} tensors, but this model implies 27; "
        "this file belongs to another architecture",
        separator=" ",
    )


@pytest.mark.parametrize("shape", [(4, 1), (0, 0), (2**63, 2)])
def test_another_shape_in_the_last_tensor_changes_nothing(file, shape):
    poke(file, file.stat().st_size - 2 * 16 - 16, *shape)
    refused(
        file,
        InvalidSnapshot,
        f"tensor 26 (model.norm.weight) is {shape[0]} x {shape[1]}, but this model implies 1 x 4; "
        "this file belongs to another architecture",
    )


def test_a_file_cut_anywhere_changes_nothing(file):
    whole = file.read_bytes()
    moments = fresh()
    for size in [*range(40), *range(40, len(whole), 37), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(Io, match=f"^{file} is cut short: it has {size} bytes, but ") as caught:
            opt.read(file, moments)
    assert str(caught.value).endswith(
        f"but this model implies {len(whole)}; copy it again, or go back to an older one"
    )
    assert untouched(moments)


def test_a_disk_that_fails_at_the_end_changes_nothing(file, monkeypatch):
    moments = fresh()
    real = opt.Reader.read_through

    def fail(self):
        real(self)
        raise Io("the disk failed")

    monkeypatch.setattr(opt.Reader, "read_through", fail)
    with pytest.raises(Io, match="the disk failed"):
        opt.read(file, moments)
    assert untouched(moments)


def test_an_impossible_counter_is_refused(file):
    poke(file, 16, 2**63)
    refused(file, InvalidSnapshot, f"says that {2**63} updates were done; it is damaged", " ")


def test_bytes_past_the_end_are_warned_of(file):
    with file.open("ab") as grown:
        grown.write(b"12345")
    with pytest.warns(UserWarning, match=f"^{file}: the 5 bytes after the last tensor are ignored"):
        assert opt.read(file, fresh()) == 7


def test_a_failed_write_keeps_the_old_file(file, monkeypatch):
    before = file.read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "fsync", full)
    with pytest.raises(Io, match=f"^cannot write {file}: No space left on device; free some space"):
        opt.write(file, 8, golden_moments())
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == ["model.opt"]


def poke(path, place, *numbers):
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{len(numbers)}Q", data, place, *numbers)
    path.write_bytes(data)


def refused(path, kind, message, separator=": "):
    moments = fresh()
    with pytest.raises(kind) as caught:
        opt.read(path, moments)
    assert str(caught.value) == f"{path}{separator}{message}"
    assert untouched(moments)
