"""`python -m fastbrain.sweep_arch` from words to line: what is measured, and what it says."""

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_sweep_arch_watch import UUID, Nvml

from fastbrain import TransformerLm
from fastbrain.config import TransformerConfig
from fastbrain.plan import known_card
from fastbrain.sweep_arch import command
from fastbrain.sweep_arch.line import line, short_count
from fastbrain.sweep_arch.measure import Measurement, measure, spread_ids
from fastbrain.sweep_arch.place import Place
from fastbrain.sweep_arch.request import Request

SMALL = ["1000", "64", "3", "2", "32"]
CARD = Place(torch.device("cuda", 0), "NVIDIA GeForce RTX 3060", 12 * 2**30, UUID)
MIB = 2**20


def program(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastbrain.sweep_arch", *words]
    return subprocess.run(command, capture_output=True, text=True, **options)


def fake(seconds=(0.5, 0.25, 0.2, 0.5, 0.1), losses=(7.0,), memory=None, mixed=False):
    """A measurement that takes no time."""
    found = {"peak_bytes": 900 * MIB} | (memory or {})
    return lambda request, place, watch: Measurement(list(seconds), list(losses), found, mixed)


def on_card(monkeypatch, capsys, words, nvml=None, card=CARD, **figures):
    """The exit code, the document and what was warned of, as on a card that is not there."""
    monkeypatch.setattr(Place, "find", classmethod(lambda cls, wanted: card))
    monkeypatch.setattr(Place, "synchronize", lambda place: None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = {"device_peak_bytes": 2158 * MIB, "reserved_bytes": 950 * MIB}
    code = command.main([*words, "--json"], fake(memory=memory, mixed=True, **figures))
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.mark.slow
def test_a_small_shape_prints_its_one_line():
    done = program(*SMALL, "1", "4", "2", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    pattern = (
        r"v1000 d64 L3 2x32 moe4x2 {10}0\.2M tot {4}0\.2M act +[\d.]+ tok/s \([\d.]+-[\d.]+\)  "
        r"0\.\d{4} TFLOPS  MFU unknown  peak \d+ MiB  +\d+\.\d days for 50B\n"
    )
    assert re.fullmatch(pattern, done.stdout), done.stdout


def test_json_says_everything_and_it_agrees_with_itself():
    words = [*SMALL, "--steps", "6", "--tokens", "3.5B", "--device", "cpu", "--json"]
    done = program(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    config = TransformerConfig(**found["config"] | {"moe_layers": (2,)})
    assert found["parameters"] == config.parameter_counts()._asdict()
    assert found["label"] == "v1000 d64 L3 2x32 moe8x2"
    assert found["command"] == "python -m fastbrain.sweep_arch " + " ".join(words)
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["device"] == "cpu"
    assert (found["device"]["threads"] or 0) >= 1
    assert len(found["step_seconds"]) == len(found["losses"]) == 6
    rate = found["tokens_per_s"]
    assert rate["lowest"] == 64 / max(found["step_seconds"])
    assert rate["highest"] == 64 / min(found["step_seconds"])
    assert rate["lowest"] <= rate["median"] <= rate["highest"]
    counted = 6 * found["parameters"]["active"] + 12 * 3 * 32 * 64
    assert found["flops_per_token"] == counted
    assert found["tflops"] == pytest.approx(rate["median"] * counted / 1e12)
    assert (found["mfu"], found["peak_tflops"], found["gpu"]) == (None, None, None)
    assert found["days"] == pytest.approx(3.5e9 / rate["median"] / 86_400)
    assert found["mixed_precision"] is False
    assert found["prediction"]["peak_bytes"] > 0
    assert found["prediction"]["step_ms"] is None
    assert 100 * MIB < found["memory"]["before_model_bytes"] < found["memory"]["peak_bytes"]


def test_steps_are_training_steps_on_one_batch(monkeypatch):
    """Seven updates, each on the same ids, and a loss that falls."""
    seen = []
    accumulate = TransformerLm.accumulate_step

    def watched(model, batch):
        seen.append((model, batch.ids.clone()))
        return accumulate(model, batch)

    cleared = []
    monkeypatch.setattr(TransformerLm, "accumulate_step", watched)
    monkeypatch.setattr(TransformerLm, "zero_grad", lambda model: cleared.append(model))
    config = TransformerConfig(97, 64, 2, 1, 1, 64, 96, moe_layers=(), max_seq_len=32)
    found = measure(Request(config, 4, 16, steps=5), Place.find("cpu"), None)
    model, ids = seen[0]
    assert len(seen) == len(cleared) == 7
    assert all(torch.equal(ids, other) for _, other in seen)
    assert model.optimizer_step() == 7
    assert len(found.seconds) == len(found.losses) == 5
    assert all(seconds > 0 for seconds in found.seconds)
    assert found.losses == sorted(found.losses, reverse=True)
    assert found.losses[0] - found.losses[-1] > 0.001


def test_the_device_is_waited_for_and_its_memory_read_at_each_step(monkeypatch):
    """Time is taken once the work is done, and only then is memory looked at."""
    events = []

    class Sampler:
        def sampling(self):
            events.append("sampling")
            return nullcontext()

    class Probe:
        def poll(self):
            events.append("poll")

        def peaks(self):
            return {"peak_bytes": 1}

    monkeypatch.setattr("fastbrain.sweep_arch.measure.probe", lambda place: Probe())
    monkeypatch.setattr(Place, "synchronize", lambda place: events.append("wait"))
    monkeypatch.setattr(
        "fastbrain.sweep_arch.measure.time.perf_counter", lambda: events.append("clock") or 0.0
    )
    config = TransformerConfig(97, 64, 1, 1, 1, 64, 96, moe_layers=(), max_seq_len=32)
    measure(Request(config, 1, 4), Place.find("cpu"), Sampler())
    step = ["clock", "wait", "clock", "poll"]
    assert events == ["wait", "poll", "sampling", *step * 5]


def test_ids_are_the_reference_systems():
    state, expected = 0x2545F4914F6CDD1D, []
    for _ in range(3):
        state ^= state << 13 & (2**64 - 1)
        state ^= state >> 7
        state ^= state << 17 & (2**64 - 1)
        expected.append(state % 32_000)
    ids = spread_ids(32_000, 8, 1024)
    assert ids.shape == (8, 1024)
    assert ids.ravel()[:3].tolist() == expected
    assert (ids == spread_ids(32_000, 8, 1024)).all()


@pytest.mark.parametrize("vocab", [1, 2, 97, 1000, 32_000])
def test_ids_span_the_vocabulary_evenly(vocab):
    ids = spread_ids(vocab, 16, 512).ravel()
    assert ids.min() >= 0
    assert ids.max() < vocab
    # a quarter of the vocabulary has a quarter of the ids
    for quarter in range(4):
        low, high = vocab * quarter // 4, vocab * (quarter + 1) // 4
        share = ((ids >= low) & (ids < high)).mean()
        assert share == pytest.approx((high - low) / vocab, abs=0.03)


def test_the_rate_is_that_of_the_median_step(monkeypatch, capsys):
    words = ["--device", "cpu", "--tokens", "1e9", "--json"]
    assert command.main([*SMALL, *words], fake()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_s"] == {"median": 256.0, "lowest": 128.0, "highest": 640.0}
    assert found["days"] == pytest.approx(1e9 / 256 / 86_400)
    assert line(found).startswith(
        f"{'v1000 d64 L3 2x32 moe8x2':30}    0.3M tot    0.2M act      256 "
    )


def test_flags_may_stand_among_the_positionals(capsys):
    assert command.main(["1000", "--device", "cpu", "64", "3", "--json", "2", "32"], fake()) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "v1000 d64 L3 2x32 moe8x2"


def test_a_known_card_has_its_mfu_and_its_prediction(monkeypatch, capsys):
    code, found, err = on_card(monkeypatch, capsys, SMALL, Nvml(clock=1777))
    card = known_card(CARD.name)
    assert (code, err) == (0, "")
    assert found["mfu"] == found["tflops"] * 1e12 / card.tensor_flops
    assert found["peak_tflops"] == card.tensor_flops / 1e12
    assert found["prediction"]["card"] == "rtx3060"
    assert found["prediction"]["step_ms"] > 0
    assert found["gpu"]["driver"] == "615.71.09"
    text = line(found)
    assert re.search(r"MFU +\d+\.\d%  peak 900 MiB \(device 2158 MiB\)  ", text), text


def test_an_unknown_card_has_no_mfu(monkeypatch, capsys):
    card = Place(torch.device("cuda", 0), "NVIDIA Nameless 9", 2**34, UUID)
    _, found, _ = on_card(monkeypatch, capsys, SMALL, Nvml(clock=2100), card)
    assert (found["mfu"], found["prediction"]["card"]) == (None, None)
    assert "  MFU unknown  " in line(found)


def test_what_the_driver_says_against_the_figures_is_warned_of(monkeypatch, capsys):
    code, found, err = on_card(monkeypatch, capsys, SMALL, Nvml(before=[11]))
    assert code == 0
    assert len(found["warnings"]) == 1
    assert err == f"fastbrain: warning: {found['warnings'][0]}\n"
    assert "another process uses this GPU" in err


def test_without_the_drivers_module_there_is_one_note(monkeypatch, capsys):
    _, found, err = on_card(monkeypatch, capsys, SMALL)
    assert len(err.splitlines()) == 1
    assert "was not checked: nvidia-ml-py is not installed" in err
    assert found["gpu"]["unchecked"] == "nvidia-ml-py is not installed"


def test_the_cpu_is_not_asked_for_a_driver(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(before=[11]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in ([], ["--device", "cpu"]):
        assert command.main([*SMALL, *words], fake()) == 0
        assert capsys.readouterr().err == ""


def test_a_loss_that_is_not_finite_is_said(capsys):
    code = command.main([*SMALL, "--device", "cpu", "--json"], fake(losses=[7.0, math.nan]))
    captured = capsys.readouterr()
    assert code == 0
    assert "the loss is not finite" in captured.err
    assert json.loads(captured.out)["losses"] == [7.0, None]


def test_a_note_on_the_shape_is_said_and_kept(capsys):
    command.main(["1000", "64", "2", "2", "32", "--device", "cpu", "--json"], fake())
    captured = capsys.readouterr()
    assert captured.err.startswith("fastbrain: warning: layers is 2")
    assert len(json.loads(captured.out)["warnings"]) == 1


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_terminal_is_told_what_is_coming(words, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command.main([*SMALL, "--device", "cpu", *words], fake())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (1 if words else 2)
    assert ("2 steps to warm up and 5 timed ones" in lines[0]) is not bool(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_refused(capsys):
    for device in ("cuda", "cuda:3"):
        assert command.main([*SMALL, "--device", device], fake()) == 2
        assert f"fastbrain: --device is {device}, and there is none" in capsys.readouterr().err


@pytest.fixture
def two_cards(monkeypatch):
    """A machine of two cards, as far as torch.cuda tells."""
    properties = SimpleNamespace(name="RTX 3060", total_memory=2**33, uuid="1d0c")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.parametrize(("wanted", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_card_that_was_asked_for_is_found(wanted, index, two_cards):
    place = Place.find(wanted)
    assert place == Place(torch.device("cuda", index), "RTX 3060", 2**33, "GPU-1d0c")
    assert place.is_cuda
    assert not Place.find("cpu").is_cuda


def test_a_card_past_the_last_is_refused(two_cards, capsys):
    assert command.main([*SMALL, "--device", "cuda:2"], fake()) == 2
    assert "--device is cuda:2, and cards 0 to 1 are there" in capsys.readouterr().err


def test_a_model_goes_to_its_card_within_the_budget(monkeypatch):
    moved = []
    probe = SimpleNamespace(poll=lambda: None, peaks=lambda: {"peak_bytes": 1})
    monkeypatch.setattr("fastbrain.sweep_arch.measure.probe", lambda place: probe)
    monkeypatch.setattr(Place, "synchronize", lambda place: None)
    monkeypatch.setattr(TransformerLm, "to_cuda", lambda model, *words: moved.append(words))
    config = TransformerConfig(97, 64, 1, 1, 1, 64, 96, moe_layers=(), max_seq_len=32)
    card = Place(torch.device("cuda", 1), "a card", 2**33)
    measure(Request(config, 1, 4, budget_mib=900), card, None)
    measure(Request(config, 1, 4, budget_mib=900), Place.find("cpu"), None)
    assert moved == [(1, 900)]


def test_ctrl_c_ends_quietly(capsys):
    def interrupted(request, place, watch):
        raise KeyboardInterrupt

    assert command.main([*SMALL, "--device", "cpu"], interrupted) == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_our_own_is_not_called_memory():
    def broken(request, place, watch):
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        command.main([*SMALL, "--device", "cpu"], broken)


@pytest.mark.parametrize(
    ("count", "text"),
    [(50 * 10**9, "50B"), (3_500_000_000, "3.5B"), (2 * 10**12, "2T"), (10**6, "1M"), (999, "999")],
)
def test_counts_of_tokens_are_short(count, text):
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "    256 tok/s (256-256)"), (8, "    8.0 tok/s (8.0-8.0)")]
)
def test_slow_rates_have_a_decimal(seconds, text, capsys):
    command.main([*SMALL, "--device", "cpu"], fake([seconds]))
    assert text in capsys.readouterr().out
