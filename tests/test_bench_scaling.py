"""`python -m bench.scaling`: what it refuses, what it starts, and its arithmetic."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from result_files import MACHINE, cells, lines_with

from bench import scaling, scaling_rank
from bench.report import measured
from bench.shapes import CARD, TOY
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks

MIB = 2**20


class Torchrun:
    """Answers for torchrun: `rates` by number of ranks and kind, a text where one fails."""

    def __init__(self, rates):
        self.rates = rates
        self.commands: list[list[str]] = []

    def __call__(self, command):
        self.commands.append(command)
        words = dict(pairwise(command))
        (ranks,) = [int(w.partition("=")[2]) for w in command if w.startswith("--nproc-per-node=")]
        answer = self.rates[ranks, words.get("--parallel", "alone")]
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        found = {"tokens_per_s": answer, "peak_bytes": 1000 * MIB // ranks}
        Path(words["--out"]).write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, 0, "", "")


RATES = {
    (1, "alone"): [900.0, 1000.0, 1100.0],
    (2, "ddp"): [1900.0, 1901.0, 1800.0],
    (2, "fsdp"): [1500.0, 1500.0, 1500.0],
    (3, "ddp"): [2700.0, 2700.0, 2700.0],
    (3, "fsdp"): [2400.0, 2400.0, 2400.0],
}


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        (0, "this machine has no card that PyTorch can use, and CPUs are not timed: gloo on one "),
        (1, "this machine has one card, and scaling is measured on two at least; one card is "),
    ],
)
def test_fewer_than_two_cards_are_refused_in_a_sentence(cards, said, capsys, tmp_path):
    torchrun = Torchrun({})
    file = tmp_path / "found.json"
    assert scaling.main(["--json", str(file)], lambda: cards, torchrun) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), torchrun.commands) == ("", 1, [])
    assert err.startswith(f"bench.scaling: {said}")
    assert not file.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_a_rank_without_a_card_times_nothing(monkeypatch, capsys, tmp_path):
    out = tmp_path / "run.json"
    words = ["scaling_rank", "--shape", "dense", "--out", str(out), "--smoke"]
    monkeypatch.setattr(sys, "argv", words)
    assert scaling_rank.main() == 2
    assert capsys.readouterr().err == f"bench.scaling: {scaling.NO_CARDS}\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("cards", "counts"),
    [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_ranks_double_up_to_all_cards(cards, counts):
    assert scaling.rank_counts(cards) == counts


def test_efficiency_is_of_as_many_times_one_rank(capsys, tmp_path):
    file, torchrun = tmp_path / "found.json", Torchrun(RATES)
    words = ["--shape", "dense", "--json", str(file)]
    assert scaling.main(words, lambda: 3, torchrun) == 0
    document = json.loads(file.read_text())
    assert document["kind"] == "scaling"
    assert document["machine"]["command"] == f"python -m bench.scaling {' '.join(words)}"
    assert {"commit", "date", "torch", "cpu"} < set(document["machine"])
    assert document["machine"]["cards"] == "3"
    (result,) = document["results"]
    assert (result["shape"], result["precision"]) == (str(CARD["dense"]), "bf16")
    assert result["failed"] == []
    found = [(e["ranks"], e["parallel"], e["efficiency"]) for e in result["runs"]]
    assert found == [
        (1, "alone", 1.0), (2, "ddp", 0.95), (2, "fsdp", 0.75), (3, "ddp", 0.9), (3, "fsdp", 0.8),
    ]  # fmt: skip
    tokens = CARD["dense"].tokens
    assert result["runs"][0]["ms_per_step"] == tokens
    assert result["runs"][1]["ms_per_step"] == pytest.approx(1e3 * 2 * tokens / 1900)
    lines = capsys.readouterr().out.splitlines()
    assert [each.split() for each in lines if each.startswith("    2 ")] == [
        ["2", "ddp", "1,900", f"{2e3 * tokens / 1900:,.1f}", "95.0%", "500"],
        ["2", "fsdp", "1,500", f"{2e3 * tokens / 1500:,.1f}", "75.0%", "500"],
    ]


def test_each_number_of_ranks_is_a_start_of_torchrun(capsys):
    torchrun = Torchrun(RATES)
    words = ["--precision", "fp32", "--rounds", "2", "--steps", "7", "--smoke"]
    assert scaling.main(words, lambda: 2, torchrun) == 0
    starts = []
    for command in torchrun.commands:
        assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        module = command.index("bench.scaling_rank")
        assert command[module - 1] == "-m"
        own = dict(zip(command[module + 1 :], [*command[module + 2 :], ""], strict=True))
        assert (own["--precision"], own["--rounds"], own["--steps"]) == ("fp32", "2", "7")
        assert "--smoke" in own
        starts.append((own["--shape"], command[4], own.get("--parallel")))
    one, two = "--nproc-per-node=1", "--nproc-per-node=2"
    assert starts == [
        ("dense", one, None), ("dense", two, "ddp"), ("dense", two, "fsdp"),
        ("moe", one, None), ("moe", two, "ddp"), ("moe", two, "fsdp"),
    ]  # fmt: skip
    assert str(TOY["moe"]) in capsys.readouterr().out


def test_a_start_that_fails_ends_no_other(capsys, tmp_path):
    buried = (
        "W1130 torchrun says this and that\n"
        "bench.scaling: another rank has ended or does not answer\n"
        "bench.scaling: CUDA is out of memory\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n"
    )
    trace = "Traceback (most recent call last):\nValueError: no such thing\n[W1130] bye\n"
    rates = RATES | {(1, "alone"): buried, (2, "fsdp"): trace}
    file = tmp_path / "found.json"
    words = ["--shape", "moe", "--json", str(file)]
    assert scaling.main(words, lambda: 2, Torchrun(rates)) == 1
    (result,) = json.loads(file.read_text())["results"]
    assert [(each["ranks"], each["efficiency"]) for each in result["runs"]] == [(2, None)]
    assert [each["why"] for each in result["failed"]] == [
        "CUDA is out of memory", "ValueError: no such thing",
    ]  # fmt: skip
    assert "FAILED: CUDA is out of memory" in capsys.readouterr().out


class Clock:
    """Nanoseconds, which steps move on."""

    now = 0

    def __call__(self):
        return self.now


class Slow(Ranks):
    """Two ranks of which the other takes twice as long."""

    def highest(self, value):
        return 2 * value

    def barrier(self):
        pass


def test_a_round_is_as_long_as_the_slowest_rank_takes():
    clock, steps = Clock(), []

    def step():
        steps.append(clock.now)
        # the first ones compile, and the third round is disturbed
        clock.now += 10**9 if len(steps) <= 3 else 10**6 * (4 if len(steps) > 11 else 1)

    ranks = Slow(Launch(world_size=2), torch.device("cpu"))
    rates = scaling_rank.tokens_per_s(step, TOY["dense"], ranks, 3, 4, clock)
    assert len(steps) == scaling_rank.WARM_UP_STEPS + 3 * 4
    each = 2 * TOY["dense"].tokens / 2e-3
    assert rates == pytest.approx([each, each, each / 4])


def test_a_rank_trains_on_rows_of_its_own(monkeypatch):
    ranks = Ranks(Launch(), torch.device("cpu"))
    model = scaling_rank.trained(TOY["moe"], ranks, "ddp", "fp32")
    seen, shared = [], []
    accumulate = type(model).accumulate_step

    def watched(self, batch, weight=1.0, auxiliary_weight=None):
        seen.append(batch.ids.clone())
        shared.append(weight)
        return accumulate(self, batch, weight, auxiliary_weight)

    monkeypatch.setattr(type(model), "accumulate_step", watched)
    before = model.module.norm.weight.detach().clone()
    step = scaling_rank.stepper(model, TOY["moe"], ranks)
    step()
    step()
    assert not torch.equal(before, model.module.norm.weight)
    assert model.optimizer_step() == 2
    other = Ranks(Launch(rank=1, world_size=2), torch.device("cpu"))
    scaling_rank.stepper(model, TOY["moe"], other)()
    assert len({tuple(ids.flatten().tolist()) for ids in seen}) == 3
    assert shared == [1, 1, 0.5]


def test_a_result_file_renders(tmp_path):
    run = {"ranks": 1, "parallel": "alone", "tokens_per_s": [900.0, 1000.0, 1100.0]}
    run |= {"peak_bytes": 4321 * MIB, "ms_per_step": 8192.04, "efficiency": 1.0}
    two = run | {"ranks": 2, "parallel": "ddp", "tokens_per_s": [1901.0], "efficiency": None}
    result = {"shape": str(CARD["dense"]), "precision": "bf16", "steps": 10, "runs": [run, two]}
    result["failed"] = [{"ranks": 2, "parallel": "fsdp", "why": "out of memory"}]
    document = {"kind": "scaling", "machine": MACHINE | {"cards": "2"}, "results": [result]}
    (tmp_path / "found.json").write_text(json.dumps(document))
    text = measured.section(measured.load(tmp_path))
    assert "#### Scaling (MEASURED)" in text
    assert "cards         2" in text
    [line] = lines_with(text, "| 1 | alone |")
    assert cells(line)[2:] == ["1,000", "900 to 1,100", "578.7", "8,192.0", "100.0", "4,321"]
    [line] = lines_with(text, "| 2 | ddp |")
    assert cells(line)[2:4] == ["1,901", "1,901 to 1,901"]
    assert lines_with(text, "* 2 ranks, fsdp failed: out of memory")
