"""A token file that changes under its reader is reported, by the byte that was wanted."""

import os

import pytest

from fastbrain.errors import InvalidConfig, InvalidDataset, Io
from fastbrain.tokens import TokenFile


@pytest.fixture
def thousand(tmp_path):
    path = tmp_path / "corpus.bin"
    TokenFile.write(path, range(1000))
    return path


def test_a_file_cut_short_is_reported_with_the_byte(thousand):
    file = TokenFile.open(thousand, 0)
    file.read(500, 10)
    os.truncate(thousand, 2002)
    with pytest.raises(InvalidDataset, match=r"changed .* at byte 2400, of 4000 .* now has 2002"):
        file.read(600, 10)
    with pytest.raises(InvalidDataset, match="changed"):
        file.batch(0, 1, 8)
    with pytest.raises(InvalidDataset, match="changed"):
        file.max_id()


def test_a_file_cut_short_between_look_and_read_is_reported_too(thousand, monkeypatch):
    file = TokenFile.open(thousand, 0)
    monkeypatch.setattr(file._file, "_check_unchanged", lambda position: None)
    os.truncate(thousand, 2002)
    assert file.read(400, 100).tolist() == list(range(400, 500))
    with pytest.raises(InvalidDataset, match=r"byte 2002, of 4000 .* cut short"):
        file.read(495, 10)


def test_a_grown_file_is_reported(thousand):
    file = TokenFile.open(thousand, 0)
    with thousand.open("ab") as more:
        more.write(b"\1\0\0\0")
    with pytest.raises(InvalidDataset, match=r"byte 40, of 4000 .* now has 4004"):
        file.read(10, 2)


def test_a_replaced_file_is_reported(thousand):
    file = TokenFile.open(thousand, 0)
    TokenFile.write(thousand, range(1, 1001))
    with pytest.raises(InvalidDataset, match=r"byte 0, .* replaced"):
        file.batch(0, 1, 1000)


def test_a_file_written_over_is_reported(thousand):
    file = TokenFile.open(thousand, 0)
    with thousand.open("r+b") as writer:
        writer.seek(2000)
        writer.write(b"\xff" * 8)
    os.utime(thousand, ns=(1, 1))
    with pytest.raises(InvalidDataset, match="overwritten"):
        file.read(0, 1)


def test_the_same_content_under_another_time_or_inode_is_let_pass(thousand, tmp_path):
    file = TokenFile.open(thousand, 0)
    os.utime(thousand, ns=(1, 1))
    assert file.read(5, 1).tolist() == [5]
    TokenFile.write(thousand, range(1000))
    assert file.read(6, 1).tolist() == [6]
    os.rename(thousand, tmp_path / "elsewhere")
    assert file.read(7, 1).tolist() == [7]
    os.unlink(tmp_path / "elsewhere")
    assert file.read(8, 1).tolist() == [8]


def test_a_closed_file_says_so(thousand):
    with TokenFile.open(thousand, 0) as file:
        pass
    with pytest.raises(Io, match="was closed"):
        file.read(0, 1)
    file.close()


def test_files_that_are_dropped_are_closed(thousand):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        TokenFile.open(thousand, 0)
    with pytest.raises(InvalidConfig):
        TokenFile.open(thousand, 0, span=(0, 0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_relative_path_outlives_a_change_of_directory(thousand, tmp_path, monkeypatch):
    monkeypatch.chdir(thousand.parent)
    file = TokenFile.open(thousand.name, 0)
    monkeypatch.chdir("/")
    os.truncate(thousand, 400)
    with pytest.raises(InvalidDataset, match="now has 400"):
        file.read(0, 1)
