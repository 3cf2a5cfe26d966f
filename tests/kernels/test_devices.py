"""Whether a device multiplies BF16 faster than FP32."""

import pytest
import torch

from fastbrain.kernels.devices import has_fast_bf16


@pytest.fixture
def cpu(monkeypatch):
    """A CPU with these capabilities; what was found out about the real one is forgotten."""

    def make(amx, **capabilities):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        has_fast_bf16.cache_clear()

    yield make
    has_fast_bf16.cache_clear()


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_bf16_instructions_is_fast(cpu, name):
    cpu(amx=False, **{name: True, "avx2": True})
    assert has_fast_bf16("cpu")


def test_a_cpu_with_matrix_tiles_is_fast(cpu):
    cpu(amx=True)
    assert has_fast_bf16("cpu")


def test_a_cpu_without_them_is_not(cpu):
    cpu(amx=False, avx2=True, avx512_bf16=False, amx_bf16=False)
    assert not has_fast_bf16("cpu")


def test_a_pytorch_that_cannot_tell_counts_as_slow(cpu, monkeypatch):
    cpu(amx=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not has_fast_bf16("cpu")
