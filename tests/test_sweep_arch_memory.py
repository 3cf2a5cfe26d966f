"""Memory of a measurement: the peak that is told, and what is said when there is not enough."""

import json
import re
import subprocess
import sys

import pytest
import torch
from test_sweep_arch import SMALL
from test_sweep_arch_request import asked

from fastbrain.errors import Cuda, CudaMemoryBudget, InvalidConfig
from fastbrain.sweep_arch import command, memory, out_of_memory, prediction
from fastbrain.sweep_arch.place import Place

MIB = 2**20
ORDER = [f"  {number}. " for number in range(1, 7)]


def failing(error):
    def measure(request, place, watch):
        raise error

    return measure


def cuda_error():
    error = Cuda("the device ran out of memory. In order, cheapest first: ...")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    return error


SHORT_OF_MEMORY = {
    "torch": (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), "CUDA out of memory. Tried"),
    "Cuda": (cuda_error(), "CUDA out of memory. Tried to allocate 2 GiB."),
    "budget": (CudaMemoryBudget(900, 100), "weights, gradients and moments need 900 MiB"),
    "python": (MemoryError(), "the machine has no more to give"),
    "numpy": (MemoryError("Unable to allocate 1 GiB"), "Unable to allocate 1 GiB"),
    "cpu": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        "[enforce fail] DefaultCPUAllocator: can't allocate memory",
    ),
    "triton": (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]"),
    "cublas": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"),
        "CUDA error: CUBLAS_STATUS_ALLOC",
    ),
}


@pytest.mark.parametrize("kind", SHORT_OF_MEMORY)
def test_out_of_memory_names_six_remedies_in_order(kind, capsys):
    error, reason = SHORT_OF_MEMORY[kind]
    assert command.main([*SMALL, "--device", "cpu"], failing(error)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second, *rest = captured.err.splitlines()
    assert first.startswith(f"fastbrain: v1000 d64 L3 2x32 moe8x2: out of memory: {reason}")
    assert second == "In order, cheapest first:"
    assert [text[:5] for text in rest] == ORDER
    assert all(": saves " in text for text in rest)


@pytest.mark.parametrize(
    "error",
    [
        InvalidConfig("out of memory"),
        RuntimeError("shapes cannot be multiplied"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error):
    assert out_of_memory.reason(error) is None


def test_savings_are_of_this_shape():
    remedies = [
        prediction.Remedy("a smaller micro-batch", 1234 * MIB),
        prediction.Remedy("mixed precision", 0),
    ]
    assert out_of_memory.advice(remedies).splitlines() == [
        "In order, cheapest first:",
        "  1. a smaller micro-batch: saves about 1,234 MiB",
        "  2. mixed precision: saves nothing here",
    ]


def test_memory_is_free_again_when_remedies_are_named(monkeypatch):
    """The model would else be held by the error's traceback."""
    alive = []

    class Model:
        def __init__(self):
            alive.append(self)

        def __del__(self):
            ended.append(self)

    ended: list[Model] = []

    def measure(request, place, watch):
        model = Model()
        alive.clear()
        raise MemoryError(f"with {type(model).__name__}")

    monkeypatch.setattr(prediction, "ways_out", lambda request, place: [] if ended else 1 / 0)
    assert command.main([*SMALL, "--device", "cpu"], measure) == 1


@pytest.mark.parametrize(
    ("words", "room_mib", "said"),
    [
        ("60000 512 3 2 64", 180, "Unable to allocate"),
        pytest.param(
            "1000 64 3 256 512",
            100,
            "DefaultCPUAllocator: can't allocate memory",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["weights", "activations"],
)
def test_a_cpu_that_has_no_more_memory_is_told_the_remedies(words, room_mib, said):
    """Two real failures: NumPy's, when the weights are drawn, and PyTorch's, in the forward."""
    script = """
import resource, sys
from pathlib import Path
import torch
from fastbrain.sweep_arch import command, document, measure
torch.set_num_threads(1)
(size,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmSize" in x)
limit = int(size.split()[1]) * 1024 + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(command.main(sys.argv[2:]))
"""
    if memory.resident_bytes() is None:
        pytest.skip("this system does not tell how much address space a process has")
    call = [sys.executable, "-c", script, str(room_mib), *words.split(), "--device", "cpu"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(f"out of memory: .*{said}", done.stderr), done.stderr
    assert [text[:5] for text in done.stderr.splitlines()[2:]] == ORDER


def test_a_budget_on_the_cpu_is_held_against_the_plan(capsys):
    measured = []
    words = ["32000", "512", "8", "2", "64", "--device", "cpu"]
    place = Place.find("cpu")
    need = prediction.planned(asked(" ".join(words)), place).memory.peak_bytes

    def measure(request, place, watch):
        measured.append(request)
        raise KeyboardInterrupt

    # the process itself, which counts, may grow a little meanwhile
    too_little, enough = need // MIB - 40, need // MIB + 40
    assert command.main([*words, "--budget-mib", str(too_little)], measure) == 1
    captured = capsys.readouterr()
    assert f"more than the budget of {too_little:,} MiB" in captured.err
    assert [text[:5] for text in captured.err.splitlines()[2:]] == ORDER
    assert not measured
    assert command.main([*words, "--budget-mib", str(enough)], measure) == 130
    assert len(measured) == 1


def test_what_cannot_fit_the_machine_is_not_begun(monkeypatch, capsys):
    little = Place(torch.device("cpu"), "a small CPU", 64 * MIB)
    monkeypatch.setattr(Place, "find", classmethod(lambda cls, wanted: little))
    assert command.main(["32000", "512"], failing(AssertionError("begun"))) == 1
    assert "need 842 MiB, and this machine has 64 MiB" in capsys.readouterr().err


def test_activations_that_cannot_fit_the_machine_are_not_begun(monkeypatch, capsys):
    # its weights are small; 51 million tokens a step are not
    machine = Place(torch.device("cpu"), "a CPU", 2**34)
    monkeypatch.setattr(Place, "find", classmethod(lambda cls, wanted: machine))
    words = ["500", "64", "3", "100000", "512", "0"]
    assert command.main(words, failing(AssertionError("begun"))) == 1
    assert "and this machine has 16,384 MiB" in capsys.readouterr().err


def test_the_peak_is_of_this_program_and_not_of_whoever_started_it():
    """What a large parent had is not counted, and a passing peak of our own is."""
    if memory.resident_bytes() is None:
        pytest.skip("this system tells the peak of a process and of its parent as one")
    script = """
import json
from fastbrain.sweep_arch import memory
before = memory.peak_resident_bytes()
block = b"1" * (300 << 20)
del block
print(json.dumps([before, memory.peak_resident_bytes(), memory.resident_bytes()]))
"""
    ballast = b"1" * (1500 * MIB)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    del ballast
    assert done.returncode == 0, done.stderr
    before, peak, now = json.loads(done.stdout)
    assert before < 1000 * MIB
    # the system counts in batches of pages
    assert 290 * MIB <= peak - before < 320 * MIB
    assert now < peak - 250 * MIB


def test_where_the_system_has_no_such_file_getrusage_tells_the_peak(monkeypatch, tmp_path):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.resident_bytes() is None
    assert memory.peak_resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Card:
    """A card's counters, in place of torch.cuda."""

    def __init__(self, monkeypatch, free):
        self.free, self.reset = iter(free), []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(self.free), 1000))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset.append)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 350)


def test_a_cards_peak_is_told_by_the_allocator_and_by_the_card(monkeypatch):
    card = Card(monkeypatch, free=[900, 400, 250, 380])
    place = Place(torch.device("cuda", 0), "a card", 1000)
    watched = memory.probe(place)
    for _ in range(3):
        watched.poll()
    assert card.reset == [place.torch_device]
    assert watched.peaks() == {
        "peak_bytes": 300,
        "reserved_bytes": 350,
        "device_peak_bytes": 750,
        "device_before_model_bytes": 100,
    }
