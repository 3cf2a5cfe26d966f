"""`fastbrain doctor`: what it finds, what it advises, and that nothing broken stops it."""

import errno
import json
import math
import os
import subprocess
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch
from help_examples import examples
from made_runs import command

from fastbrain import atomic, kernels
from fastbrain.commands import doctor, doctor_check, doctor_device, doctor_disk, doctor_machine
from fastbrain.commands.doctor_check import Check, output_of
from fastbrain.training import lock

PROPERTIES = namedtuple("PROPERTIES", "name major minor")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(doctor_disk, "_WRITTEN", 4 << 20)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {each.name: each for each in checks}


def nvidia(monkeypatch, **answers: str) -> None:
    """Let nvidia-smi be there, and answer a query with what is given for it."""

    def run(command, **_):
        query = command[1].replace("-", "_")
        asked = next((answers[key] for key in answers if key in query), None)
        if command[0] != "nvidia-smi" or asked is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess(command, 0, asked, "")

    monkeypatch.setattr(doctor_check.subprocess, "run", run)


def card(monkeypatch, capability: tuple[int, int] = (8, 6), free: float = 11e9) -> None:
    """Let there be a card, as far as PyTorch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: PROPERTIES("Card", *capability)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free), 12 * 10**9))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: capability >= (8, 0))
    monkeypatch.setattr(doctor_device, "_kernel", lambda: Check("a kernel", "right"))


def test_a_machine_that_can_train(tmp_path, capsys):
    assert command(doctor, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["able"], found["directory"]) == (True, str(tmp_path))
    checks = {each["name"]: each for each in found["checks"]}
    for name in ("fastbrain", "torch", "numpy", "safetensors", "tokenizers"):
        assert checks[name]["value"] == metadata.version(name)
    for name in ("system", "cpu", "cpu bf16", "memory", "threads", "gpu", "kernels", "file system",
                 "free space", "disk write", "disk read", "fsync", "rename", "locks"):  # fmt: skip
        assert checks[name]["state"] in ("ok", "warning")
    assert "(4 MB, with fsync)" in checks["disk write"]["value"]
    assert checks["locks"]["value"] == "work"
    assert list(tmp_path.iterdir()) == []


def test_the_text_has_a_line_for_each_and_a_conclusion(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor_device, "checks", lambda: [Check("gpu", "old", "problem", "Why.")])
    assert command(doctor, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("PROBLEM  gpu          old")
    assert lines[at + 1] == " " * 22 + "Why."
    assert lines[-1] == "A run cannot be trained here yet: gpu."


def test_a_directory_that_is_not_there_is_refused(tmp_path, capsys):
    assert command(doctor, tmp_path / "none") == 2
    assert capsys.readouterr().err == f"fastbrain: there is no directory {tmp_path / 'none'}\n"


def test_what_breaks_is_a_finding_of_its_own(tmp_path, monkeypatch, capsys):
    def broken():
        raise RuntimeError("the driver\nis gone")

    monkeypatch.setattr(doctor_device, "checks", broken)
    monkeypatch.setattr(doctor_machine, "_threads", broken)
    assert command(doctor, tmp_path, "--json") == 1
    checks = [Check(**each) for each in json.loads(capsys.readouterr().out)["checks"]]
    for name in ("device", "threads"):
        found = by_name(checks)[name]
        assert (found.state, found.advice) == ("problem", "RuntimeError: the driver is gone")
    assert by_name(checks)["locks"].value == "work"


def test_a_missing_package_is_a_problem_but_triton_alone(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_machine.metadata, "version", version)
    found = by_name(doctor_machine.checks())
    assert (found["torch"].state, found["triton"].state) == ("problem", "ok")
    assert "pip install torch" in found["torch"].advice


def test_threads_that_have_no_core_are_warned_of(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(doctor_machine, "_cores", lambda: 4)
    found = doctor_machine._threads()
    assert found.state == "warning"
    assert "OMP_NUM_THREADS=4" in found.advice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0, 0))
    assert "OMP_NUM_THREADS=1" in doctor_machine._threads().advice


def test_a_good_card(monkeypatch):
    card(monkeypatch)
    nvidia(monkeypatch, driver_version="570.1\n", compute_apps="", display_active="Enabled\n")
    found = by_name(doctor_device.checks())
    assert found["gpu"] == Check("gpu", "Card, capability 8.6, driver 570.1")
    assert found["gpu memory"].value == "12.0 GB, 11.0 GB free"
    assert found["gpu users"].value == "no other"
    assert found["display"].value == "attached to the card"
    assert not [each for each in found.values() if each.state == "problem"]


def test_a_card_that_others_use(monkeypatch):
    card(monkeypatch, free=1e9)
    listed = f"{os.getpid()}, python, 1 MiB\n4711, /usr/bin/game, 900 MiB\n"
    nvidia(monkeypatch, compute_apps=listed, display_active="Disabled\n")
    found = by_name(doctor_device.checks())
    assert found["gpu users"].value == "4711, /usr/bin/game, 900 MiB"
    assert "half as fast" in found["gpu users"].advice
    assert (found["gpu users"].state, found["gpu memory"].state) == ("warning", "warning")
    assert (found["display"].value, found["gpu"].value[-9:]) == ("none on the card", "not known")


def test_an_old_card_is_a_problem_and_runs_no_kernel(monkeypatch):
    card(monkeypatch, (7, 5))
    nvidia(monkeypatch)
    found = by_name(doctor_device.checks())
    assert (found["gpu"].state, found["gpu bf16"].state) == ("problem", "problem")
    assert "CUDA_VISIBLE_DEVICES=" in found["gpu"].advice
    assert "a kernel" not in found
    assert found["gpu users"].value == "not known"


@pytest.mark.parametrize(("cuda", "says"), [(None, "built without CUDA"), ("12.8", "CUDA 12.8")])
def test_a_card_that_pytorch_cannot_use(monkeypatch, cuda, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    nvidia(monkeypatch, _L="GPU 0: Card (UUID: x)\n")
    found = by_name(doctor_device.checks())["gpu"]
    assert found.state == "warning"
    assert says in found.advice


@pytest.mark.parametrize("has_card", [True, False])
def test_what_the_kernels_need(monkeypatch, has_card):
    bad = "problem" if has_card else "ok"
    version = "3.8.0"
    monkeypatch.setattr(doctor_device.metadata, "version", lambda name: version)
    monkeypatch.setattr(doctor_device.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor_device._triton(has_card).value == "triton 3.8.0, compiler /usr/bin/gcc"
    monkeypatch.setenv("CC", "mycc")
    assert doctor_device._triton(has_card).value.endswith("/usr/bin/mycc")
    monkeypatch.setattr(doctor_device.shutil, "which", lambda name: None)
    assert doctor_device._triton(has_card).state == bad
    version = "4.1.0"
    found = doctor_device._triton(has_card)
    assert "tested with 3.7 to 3.9" in found.advice
    assert found.state == ("warning" if has_card else "ok")


@pytest.mark.parametrize(
    ("kind", "state"),
    [("ext4", "ok"), ("9p", "warning"), ("fuse.rclone", "warning"), ("nfs4", "warning"),
     ("tmpfs", "warning")],
)  # fmt: skip
def test_the_file_system_is_that_of_the_nearest_mount(tmp_path, kind, state, monkeypatch):
    place = tmp_path / "a b" / "runs"
    place.mkdir(parents=True)
    name = str(tmp_path / "a b").replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        f"2 1 8:2 / {name} rw,nosuid shared:1 - {kind} none rw\n"
        "1 0 8:1 / / rw - xfs /dev/sda rw\n"
        f"3 1 8:3 / {tmp_path}/a rw - btrfs none rw\nshort\n"
    )
    assert doctor_disk.mounted(place, table) == (kind, str(tmp_path / "a b"))
    assert doctor_disk.mounted(tmp_path, table) == ("xfs", "/")
    assert doctor_disk.mounted(place, tmp_path / "none") == ("", "")
    monkeypatch.setattr(doctor_disk, "mounted", lambda _: (kind, "/mnt"))
    assert doctor_disk._file_system(place).state == state


def test_a_disk_that_cannot_be_written_to_stops_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(doctor_disk.tempfile, "TemporaryDirectory", full)
    found = by_name(doctor_disk.checks(tmp_path))["writing"]
    assert found.state == "problem"
    assert "Read-only file system" in found.advice


def test_a_rename_and_a_lock_that_fail_stop_a_run(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic, "rename", broken)
    monkeypatch.setattr(lock, "_try", broken)
    found = by_name(doctor_disk.checks(tmp_path))
    assert (found["rename"].state, found["locks"].state) == ("problem", "problem")
    monkeypatch.setattr(lock, "_try", lambda *_, **__: True)
    found = by_name(doctor_disk.checks(tmp_path))
    assert (found["locks"].state, found["locks"].value) == ("warning", "do not keep others out")


def test_a_slow_or_full_disk_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_disk, "_fsync_seconds", lambda *_: [0.5] * 3)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor_disk.shutil, "disk_usage", lambda _: usage(0, 0, 8 << 20))
    found = by_name(doctor_disk.checks(tmp_path))
    assert (found["fsync"].state, found["free space"].state) == ("warning", "warning")
    assert "(2 MB, with fsync)" in found["disk write"].value
    assert doctor_disk._rate("disk write", 10**8, 10.0, "x").state == "warning"


def test_no_tool_that_is_missing_or_hangs_is_an_error(monkeypatch):
    assert output_of("no-such-program-anywhere") is None
    assert output_of("false") is None

    def hangs(*_, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(doctor_check.subprocess, "run", hangs)
    assert output_of("nvidia-smi") is None


def test_a_kernel_is_held_against_the_plain_operation(monkeypatch, device):
    name = device.type  # on a CPU it runs in Triton's interpreter
    assert doctor_device._kernel(name).state == "ok"
    right = kernels.reference.rms_norm
    for wrong in (1.001, math.nan):
        monkeypatch.setattr(
            kernels.reference, "rms_norm", lambda *x, f=wrong: (right(*x)[0] * f, x[0])
        )
        found = doctor_device._kernel(name)
        assert (found.state, found.value[:9]) == ("problem", "wrong by ")

    def fails(*_):
        raise RuntimeError("ptxas\nis missing")

    monkeypatch.setattr(kernels.fused, "rms_norm", fails)
    found = doctor_device._kernel(name)
    assert (found.value, found.state) == ("fails", "problem")
    assert "RuntimeError: ptxas is missing" in found.advice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_kernel_runs_on_the_card():
    found = by_name(doctor_device.checks())
    assert found["a kernel"].state == "ok", found["a kernel"]


def test_the_examples_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for words in examples(doctor):
        assert command(doctor, *words) == 0, capsys.readouterr().out
