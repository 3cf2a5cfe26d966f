"""A model that cannot fit is refused with what it needs: in memory, and on the disk."""

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fastbrain import LoraConfig, TransformerConfig
from fastbrain.errors import InvalidConfig, Io
from fastbrain.training import devices
from fastbrain.training.devices import Device
from fastbrain.transformer import split_parameters

CPU = Device(torch.device("cpu"), "CPU", None)
WHOLE = TransformerConfig(vocab_size=300, d_model=64, n_layers=2, moe_layers=())
ADAPTED = dataclasses.replace(WHOLE, lora=LoraConfig(1))
Usage = namedtuple("Usage", "total used free")


def card(total: int) -> Device:
    return Device(torch.device("cuda", 0), "a card", total)


def needs(config: TransformerConfig) -> tuple[int, int, int]:
    """Bytes that training takes on a card, and on a CPU, and that a checkpoint has."""
    trained, frozen = split_parameters(config)
    # weights, gradients and moments; a checkpoint has no gradients
    used, saved = 16 * trained + 4 * frozen, 12 * trained + 4 * frozen
    return used, used + saved, saved


@pytest.mark.parametrize("config", [WHOLE, ADAPTED], ids=["whole", "adapted"])
def test_memory_is_asked_for_weights_that_are_frozen_too(config, monkeypatch, tmp_path):
    used, on_cpu, _ = needs(config)
    devices.check_space(config, card(used), tmp_path)
    count = sum(split_parameters(config))
    said = f"a model of {count:,} parameters needs .* for weights, gradients and moments"
    with pytest.raises(InvalidConfig, match=f"{said}; this machine has"):
        devices.check_space(config, card(used - 1), tmp_path)
    monkeypatch.setattr(devices, "machine_bytes", lambda: on_cpu)
    devices.check_space(config, CPU, tmp_path)
    monkeypatch.setattr(devices, "machine_bytes", lambda: on_cpu - 1)
    with pytest.raises(InvalidConfig, match=f"{said} and their copy for saving; this machine has"):
        devices.check_space(config, CPU, tmp_path)


def test_adapters_take_a_fraction_of_what_the_whole_model_does():
    trained, frozen = split_parameters(ADAPTED)
    assert frozen == sum(split_parameters(WHOLE))
    assert 0 < trained < frozen / 20
    # so that what is frozen decides
    assert needs(ADAPTED)[0] < needs(WHOLE)[0] / 2


@pytest.mark.parametrize("config", [WHOLE, ADAPTED], ids=["whole", "adapted"])
@pytest.mark.parametrize("device", [CPU, card(2**40)], ids=["cpu", "card"])
def test_the_disk_has_to_hold_two_checkpoints(config, device, monkeypatch, tmp_path):
    run: Path = tmp_path / "runs" / "new"
    asked = []

    def free(count: int):
        return lambda path: asked.append(path) or Usage(0, 0, count)

    _, _, saved = needs(config)
    monkeypatch.setattr(shutil, "disk_usage", free(2 * saved))
    devices.check_space(config, device, run)
    # the run is not there yet, and the folder above it tells which disk
    assert asked == [tmp_path]
    monkeypatch.setattr(shutil, "disk_usage", free(2 * saved - 1))
    with pytest.raises(Io, match=f"two checkpoints need .*, and the disk of {tmp_path} has"):
        devices.check_space(config, device, run)


def test_where_the_memory_is_not_known_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "machine_bytes", lambda: 0)
    devices.check_space(WHOLE, CPU, tmp_path)
