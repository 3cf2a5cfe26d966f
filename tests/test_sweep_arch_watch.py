"""What the driver says of the card: who else uses it, and how fast its clock runs."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from fastbrain.sweep_arch import watch as watching
from fastbrain.sweep_arch.watch import Watch

UUID = "GPU-1d0c"
OTHER = "GPU-77aa"


class Refused(Exception):
    pass


class Nvml:
    """Two cards; the lists of their processes change when `start` says that we use the first."""

    NVML_CLOCK_SM = 1
    NVMLError = Refused

    def __init__(self, before=(), newcomers=(), busy=0, clock=1777, fails=()):
        self.pids = {UUID: list(before), OTHER: [4242]}
        self.newcomers = newcomers
        self.busy, self.clock, self.fails = busy, clock, fails
        self.clock_read = threading.Event()

    def start(self, pid):
        """This process begins to use the card, known to the driver as `pid` or not at all."""
        self.pids[UUID] += [*([pid] if pid else []), *self.newcomers]

    def __getattribute__(self, name):
        if name == "nvmlDeviceGetClockInfo":
            object.__getattribute__(self, "clock_read").set()
        if name in object.__getattribute__(self, "fails"):
            raise Refused(f"{name} is not supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return b"615.71.09"

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return (OTHER, UUID)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids[handle]]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self.busy if handle == UUID else 99)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert (handle, kind) == (UUID, 1)
        return self.clock

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        assert (handle, kind) == (UUID, 1)
        return 2100


def watched(nvml, pid=None, uuid=UUID, steps_s=10.0):
    """A watch whose steps end when the clock was read, at most `steps_s` later."""
    watch = Watch(nvml)
    watch.attach(uuid)
    with watch.sampling():
        nvml.start(pid)
        if watch.unchecked is None:
            nvml.clock_read.wait(steps_s)
    return watch


@pytest.mark.parametrize("pid", [os.getpid(), 31343, None], ids=["seen", "renumbered", "hidden"])
def test_a_free_card_at_full_speed_is_quiet_about(pid):
    watch = watched(Nvml(), pid)
    assert watch.warnings(1777) == []
    assert watch.facts() == {
        "unchecked": None,
        "driver": "615.71.09",
        "other_processes": 0,
        "busy_before_percent": 0,
        "sm_clock_mhz": 1777,
        "max_sm_clock_mhz": 2100,
    }


@pytest.mark.parametrize("pid", [os.getpid(), 31343, None], ids=["seen", "renumbered", "hidden"])
def test_who_was_there_before_is_somebody_else(pid):
    watch = watched(Nvml(before=[11, 12]), pid)
    assert watch.facts()["other_processes"] == 2
    (text,) = watch.warnings(1777)
    assert text.startswith("2 other processes use this GPU")


@pytest.mark.parametrize("pid", [os.getpid(), 31343], ids=["seen", "renumbered"])
def test_who_comes_during_the_steps_is_somebody_else(pid):
    (text,) = watched(Nvml(newcomers=[13]), pid).warnings(1777)
    assert text.startswith("another process uses this GPU")


def test_a_card_that_was_busy_is_in_use_even_if_nobody_is_listed():
    (text,) = watched(Nvml(busy=37)).warnings(1777)
    assert "37% busy before the first step" in text
    assert watched(Nvml(busy=5)).warnings(1777) == []


@pytest.mark.parametrize(("clock", "slow"), [(1680, True), (1689, False), (2050, False)])
def test_a_clock_more_than_a_twentieth_below_boost_is_warned_of(clock, slow):
    found = watched(Nvml(clock=clock)).warnings(1777)
    assert [f"the SM clock was {clock} MHz" in text for text in found] == [True] * slow


def test_the_cards_own_maximum_stands_in_for_an_unknown_boost_clock():
    (text,) = watched(Nvml(clock=1777)).warnings(None)
    assert "1777 MHz during the timed steps, and the boost clock is 2100 MHz" in text


def test_steps_too_short_to_see_a_clock_are_not_called_slow(monkeypatch):
    monkeypatch.setattr(watching, "_SAMPLE_S", 60.0)
    watch = watched(Nvml(clock=100), steps_s=0.0)
    assert watch.facts()["sm_clock_mhz"] is None
    assert watch.warnings(1777) == []


def test_without_nvidia_ml_py_one_note_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = Watch()
    watch.attach(UUID)
    with watch.sampling():
        pass
    (text,) = watch.warnings(1777)
    assert text.endswith("was not checked: nvidia-ml-py is not installed")
    assert watch.facts()["unchecked"] == "nvidia-ml-py is not installed"


def test_the_installed_module_is_asked(monkeypatch):
    nvml = Nvml(before=[11])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    watch = Watch()
    watch.attach(UUID)
    assert len(watch.warnings(1777)) == 1


@pytest.mark.parametrize(
    "call",
    [
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetClockInfo",
    ],
)
def test_a_driver_that_does_not_answer_leaves_it_unchecked(call):
    watch = watched(Nvml(clock=100, fails=[call]))
    (text,) = watch.warnings(1777)
    assert text.endswith(f"was not checked: {call} is not supported")


def test_a_card_without_a_figure_of_its_load_is_checked_for_the_rest():
    (text,) = watched(Nvml(clock=100, fails=["nvmlDeviceGetUtilizationRates"])).warnings(1777)
    assert text.startswith("the SM clock was 100 MHz")


def test_a_card_that_the_driver_does_not_list_is_unchecked():
    (text,) = watched(Nvml(), uuid="MIG-5").warnings(1777)
    assert text.endswith("the driver lists no card MIG-5")
