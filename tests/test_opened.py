"""Compressed text: read through whatever parts it has, and reported where it breaks."""

import gzip
import os
import sys
from functools import partial

import pytest
from texts import codes, dumped, tokenize_lines

from fastbrain.errors import InvalidDataset


@pytest.fixture
def write(tmp_path):
    return partial(tokenize_lines, tmp_path)


def test_gzip_is_read_through_parts_and_padding(write):
    first, second = gzip.compress(dumped("ab")), gzip.compress(dumped("c") * 5_000)
    assert write(first + second + b"\0" * 20_000) == codes("ab", *["c"] * 5_000)


@pytest.mark.parametrize("damage", ["cut", "cut in the end", "flipped", "garbage behind"])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_damaged_gzip_is_reported_with_the_line_reached(write, damage, on_error):
    whole = gzip.compress(dumped(*(os.urandom(20).hex() for _ in range(1000))))
    data = {
        "cut": whole[:5000],
        "cut in the end": whole[:-3],
        "flipped": whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:],
        "garbage behind": whole + b"junk",
    }[damage]
    reason = "was cut short" if "cut" in damage else "is broken"
    # a broken part is given up whole, so the line is one within its last 16 kB
    line = r"\d{3,4}" if damage in ("cut", "flipped") else "1001"
    with pytest.raises(InvalidDataset, match=f"line {line}: the archive {reason}"):
        write(data, on_error=on_error)


def test_zstd_without_its_package_says_what_to_do(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InvalidDataset, match="pip install zstandard"):
        write(b"\x28\xb5\x2f\xfd" + b"\0" * 20)


def test_zstd_is_read_through_several_frames_and_its_end_is_checked(write):
    zstandard = pytest.importorskip("zstandard")
    first, second = zstandard.compress(dumped("ab")), zstandard.compress(dumped("c") * 5_000)
    assert write(first + second) == codes("ab", *["c"] * 5_000)
    with pytest.raises(InvalidDataset, match="cut short"):
        write(first + second[:-4])
    with pytest.raises(InvalidDataset, match="broken"):
        write(first + second[:20] + b"\xff" * 40)
