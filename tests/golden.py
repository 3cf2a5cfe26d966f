"""Small files of known bytes, and the ways to damage their headers."""

import json
import re
import struct
import time
import tracemalloc

import pytest
import torch

from fastbrain.config import TransformerConfig
from fastbrain.formats import rbw
from fastbrain.optim import Optimizer
from fastbrain.precision import Precision
from fastbrain.transformer import pieces

GOLDEN = TransformerConfig(
    vocab_size=5,
    d_model=4,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=2,
    d_ff=6,
    moe_d_ff=3,
    num_experts=2,
    experts_per_token=1,
    moe_layers=(1,),
)
ADAM = Optimizer.adam(1e-2)


def golden_tensors(config=GOLDEN):
    """Element i of tensor t is (((7i + 3t) mod 31) - 15) / 8."""
    for t, piece in enumerate(pieces(config)):
        i = torch.arange(piece.rows * piece.cols)
        values = ((7 * i + 3 * t) % 31 - 15) / 8
        yield piece.name, values.reshape(piece.rows, piece.cols)


def written(path, config=GOLDEN, optimizer=ADAM, step=3, precision=Precision.F32):
    rbw.write(path, config, optimizer, step, golden_tensors(config), precision)
    return path


def loaded(path):
    header = rbw.read_header(path)
    views = [(p.name, torch.full((p.rows, p.cols), torch.nan)) for p in pieces(header.config)]
    rbw.read_tensors(path, header, views)
    return header, views


def header_length(data):
    return struct.unpack_from("<Q", data, 8)[0]


def with_header(data, text):
    """The bytes of a file with another header text."""
    rest = data[16 + header_length(data) :]
    return data[:8] + struct.pack("<Q", len(text)) + text + rest


def with_config(data, **changes):
    found = json.loads(data[16 : 16 + header_length(data)])
    found["config"] |= changes
    return with_header(data, json.dumps(found).encode())


def refused_at_once(read, path, kind, message):
    """Checks that `read(path)` refuses: this kind, this message, under 1 s of CPU and 50 MB."""
    started = time.process_time()
    with pytest.raises(kind, match=re.escape(message)) as caught:
        read(path)
    assert time.process_time() - started < 1
    assert str(caught.value).startswith(str(path))
    assert type(caught.value) is kind
    assert str(caught.value).isascii()
    tracemalloc.start()  # which makes it several times slower
    try:
        with pytest.raises(kind):
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6
