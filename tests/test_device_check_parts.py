"""What the parts of the device check do on a card, as far as a machine without one can tell."""

import warnings
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from bench.contenders import Ours
from bench.device_check import compiling, environment, far, graphed, operations, steps
from bench.device_check.calls import TOY, listed
from bench.device_check.journal import Skipped
from bench.device_check.models import batch_shape, batches, configs, model
from bench.device_check.rule import same_bits
from bench.operations import Case
from bench.shapes import TrainingShape
from fastbrain.kernels import fused, reference

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """A card that answers questions and computes nothing."""

    def make(**answers):
        properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, uuid="0")
        given = {
            "is_available": True,
            "get_device_name": "NVIDIA H200",
            "get_device_properties": properties,
            "mem_get_info": (139 * GIB, 140 * GIB),
            "empty_cache": None,
            "synchronize": None,
            "reset_peak_memory_stats": None,
            "max_memory_allocated": 3 * GIB,
            "max_memory_reserved": 4 * GIB,
        }
        for name, answer in (given | answers).items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)

    return make


def test_every_operation_of_the_kernels_is_called():
    called = set()

    class Twin:
        def __getattr__(self, name):
            called.add(name)
            return getattr(reference, name)

    for call in listed(TOY):
        built = call.build(torch.device("cpu"))
        built.op(Twin())(**built.inputs)
    assert called == set(fused.__all__) - {"AdamScalars"}


def test_bits_are_compared_and_not_values():
    x = torch.tensor([0.0, float("nan")])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([-0.0, float("nan")]))
    assert not same_bits(x, x.bfloat16())
    assert not same_bits(x[:1], x)


def test_the_environment_describes_the_card(card):
    card()
    (_, machine), _ = environment.cases(dry=False)
    found = machine()
    assert found["device"] == "cuda"
    assert found["machine"]["card"] == "NVIDIA H200"
    assert found["machine"]["capability"] == "9.0"
    assert all(isinstance(value, str) for value in found["machine"].values())
    assert dict(environment.cases(dry=True))["machine"]()["device"] is None


def test_a_small_card_skips_what_it_has_no_room_for(card):
    card(mem_get_info=(11 * GIB, 12 * GIB))
    cases = dict(far.cases(dry=False))
    with pytest.raises(Skipped, match=r"needs 37\.3 GiB of the card, of which 11\.0 is free"):
        cases["past 2^31: adam_step, one large tensor"]()
    # it runs most of them all the same
    shares = [case.args[0] for case in cases.values()]
    assert sum(2 * share * 2**31 + GIB / 2 < 11 * GIB for share in shares) > len(shares) / 2


def test_processes_that_compile_fit_the_card_and_its_host(card, monkeypatch):
    cores = set(range(16))
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda process: cores)
    for free_gib, workers in ((139, 8), (5, 2), (0, 1)):
        card(mem_get_info=(free_gib * GIB, 139 * GIB))
        assert compiling._workers() == workers
    cores = {0}
    assert compiling._workers() == 1


def test_processes_that_compile_are_not_waited_for_without_end(monkeypatch):
    endless = [compiling.sys.executable, "-c", "import time; time.sleep(600)"]
    start = compiling.subprocess.Popen
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda command, **given: start(endless))
    monkeypatch.setattr(compiling, "_WAIT_S", 0.2)
    found = compiling._compiled(dry=True)
    assert found["ended"] == [None]
    assert found["line"] == "1 processes, 1 of which did not end well"


def test_a_captured_step_leaves_no_trace_before_it_is_replayed(monkeypatch):
    """With stand-ins for graphs, and on the reference, replays equal eager steps bit for bit."""
    held = []

    def captured(run):
        held.append(int(step_of[0]._hold))
        run()
        return run

    step_of = []
    made = graphed.GraphedStep._capture
    monkeypatch.setattr(graphed, "aside", lambda run: run())
    monkeypatch.setattr(graphed, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        graphed.GraphedStep, "_capture", lambda self: step_of.append(self) or made(self)
    )
    config = configs(dry=True)["MoE"]
    ours, theirs = (model(config, True) for _ in range(2))
    data = batches(config.vocab_size, *batch_shape(True))
    step = graphed.GraphedStep(ours, next(data), capture=True)
    assert held == [1, 1]
    for p, q in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert same_bits(p, q)
    for rate, batch in zip((1e-3, 5e-2, 1e-4), islice(data, 3), strict=True):
        step(batch, rate)
        theirs.set_learning_rate(rate)
        losses = theirs.accumulate_step(batch).total()
        norm = theirs.step_clipped(1.0, 1.0)
        assert same_bits(step.loss, losses)
        assert same_bits(step.norm, norm)
    for p, q in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert same_bits(p, q)


def test_the_fastest_peer_is_named_and_a_peer_that_fails_is_left_out(monkeypatch):
    times = {"fused": 2.0, "reference": 1.0, "slow": 9.0, "fast": 3.0}
    runs = {name: lambda name=name: name for name in times}
    runs["broken"] = lambda: 1 / 0
    monkeypatch.setattr(operations, "_milliseconds", lambda run: times[run()])
    row = operations._timed(Case("made", runs, bytes=6e9, flops=8e9), dry=False)
    assert (row["fastest_peer"], row["ratio"]) == ("fast", 1.5)
    assert row["ms"] == times
    assert "ZeroDivisionError" in row["errors"]["broken"]
    assert "4 TFLOPS, 3000 GB/s, 1.50 x as fast as fast; without broken" in row["line"]


def test_a_kernel_that_fails_fails_its_case():
    with pytest.raises(ZeroDivisionError):
        operations._timed(Case("made", {"fused": lambda: 1 / 0}), dry=False)


def test_a_peer_that_loses_the_gpu_is_not_held_against_the_kernel():
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Skipped, match="peer lost the GPU"):
        operations._timed(Case("made", {"fused": int, "peer": lost}), dry=False)


@pytest.fixture
def toy_steps(card, monkeypatch):
    """Times a trainee on a toy as on a card, on the CPU and the reference."""
    card()
    monkeypatch.setattr(steps, "fused", reference)
    monkeypatch.setattr(steps, "_device", lambda dry: torch.device("cpu"))
    shape = TrainingShape("moe", configs(dry=True)["MoE"], *batch_shape(True))

    def run(trainee):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return steps._timed(trainee, shape, dry=False)

    return run


def test_steps_are_timed_and_their_peak_stands_beside_the_plan(toy_steps):
    row = toy_steps(Ours)
    assert row["tokens_per_s"] > 0
    assert row["spread"] >= 1
    assert row["peak_bytes"] == 3 * GIB
    assert 0 < row["predicted_peak_bytes"] < GIB
    assert "peak 3,072 MiB" in row["line"]
    assert "predicted_peak_bytes" not in toy_steps(steps.Plain)


def test_steps_that_do_not_fit_are_skipped(toy_steps, card):
    card(mem_get_info=(0, 12 * GIB))
    with pytest.raises(Skipped, match="the plan says it takes"):
        toy_steps(Ours)
