"""Starting kernels, and listing starts instead."""

from contextlib import contextmanager

import pytest
import torch

from fastbrain import kernels
from fastbrain.kernels import fused, launch, reference


class Kernel:
    """Stands for a Triton kernel: keeps how it was started."""

    def __init__(self):
        self.starts = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.starts.append((grid, args, options))


def test_a_kernel_starts_on_the_device_of_its_tensors(monkeypatch):
    kernel, x, on = Kernel(), torch.zeros(2), []

    @contextmanager
    def device_of(tensor):
        on.append(tensor)
        assert not kernel.starts
        yield
        assert kernel.starts

    # Triton starts on the current device, and another one's pointers mean nothing there
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch.launch(kernel, (3,), x, 5, BLOCK=4, num_warps=2)
    assert on == [x]
    options = {"BLOCK": 4, "num_warps": 2, "enable_fp_fusion": True}
    assert kernel.starts == [((3,), (x, 5), options)]


def test_tensors_without_data_start_nothing():
    kernel = Kernel()
    launch.launch(kernel, (3,), torch.zeros(2), torch.empty(2, device="meta"))
    assert kernel.starts == []


def test_launches_are_listed_for_the_family_that_is_asked_for():
    kernel, x = Kernel(), torch.empty(2, device="meta")
    with launch.recorded("sm_90") as launches:
        assert launch.family_of(x) == "sm_90"
        with launch.recorded("sm_80") as others:
            assert launch.family_of(x) == "sm_80"
        launch.launch(kernel, (3,), x, BLOCK=4)
    assert launches == [(kernel, (3,), (x,), {"BLOCK": 4})]
    assert others == []
    assert launch.family_of(torch.zeros(2)) == launch.HOME


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((12, 0), "sm_86"),
    ],
)
def test_a_card_that_is_not_listed_takes_the_home_cards_tiles(capability, family, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    launch._card_family.cache_clear()
    assert launch._card_family(0) == family
    launch._card_family.cache_clear()


@pytest.mark.parametrize(
    ("capability", "twin"), [((7, 5), reference), ((8, 0), fused), ((12, 0), fused)]
)
def test_kernels_serve_cards_that_multiply_bf16(capability, twin, monkeypatch):
    class OnCard:
        device = torch.device("cuda", 0)
        dtype = torch.bfloat16

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    kernels.devices._capability.cache_clear()
    assert kernels._twin(OnCard()) is twin
    OnCard.dtype = torch.float64
    assert kernels._twin(OnCard()) is reference
    kernels.devices._capability.cache_clear()
