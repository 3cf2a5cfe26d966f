"""Races of training steps: who takes part, in which order, and who is held against whom."""

import itertools
import json
import sys
import weakref

import pytest
import torch

from bench import line_up, race, training_step
from bench.contenders import Absent, Contender, Ours
from bench.race import Timing
from bench.shapes import CARD, TOY, TRAINING

CPU = torch.device("cpu")
IDS = torch.zeros(2, 5, dtype=torch.int64)


class Peer:
    """One that notes its steps, and raises at one of them."""

    def __init__(self, name: str, steps: list[str], raises_at: int | None = None) -> None:
        self.name, self.steps, self.raises_at, self.taken = name, steps, raises_at, 0

    def parameters(self) -> int:
        return 3

    def use(self, precision, option):
        pass

    def zero_grad(self):
        pass

    def accumulate(self, ids):
        self.taken += 1
        if self.taken == self.raises_at:
            raise RuntimeError("no luck\nat all")
        self.steps.append(self.name)
        return torch.zeros(())

    def update(self):
        return torch.zeros(())


class Home(Peer, Ours):
    """The same, as fastbrain."""


def raced(*entries, rounds=2, steps=1):
    return race.in_turns(iter(entries), itertools.repeat(IDS), rounds, steps)


def test_turns_go_back_and_forth_after_two_steps_to_warm_up():
    taken: list[str] = []
    found = raced(Contender(Peer("a", taken), "fp32"), Contender(Peer("b", taken), "fp32"))
    assert "".join(taken) == "aabb" + "ab" + "ba"
    assert [t.label for t in found.timings] == ["a fp32", "b fp32"]
    for timing in found.timings:
        assert len(timing.tokens_per_s) == len(timing.cores) == 2
        assert all(rate > 0 for rate in timing.tokens_per_s)
        assert timing.parameters == 3


def test_a_round_is_as_many_steps_as_asked_for():
    taken: list[str] = []
    raced(Contender(Peer("a", taken), "fp32"), rounds=3, steps=4)
    assert len(taken) == 2 + 3 * 4


def test_a_peer_that_cannot_run_is_left_out(capsys):
    taken: list[str] = []
    found = raced(
        Absent("c fp32", "not installed"),
        Contender(Peer("b", taken, raises_at=2), "fp32"),
        Contender(Peer("a", taken), "fp32"),
    )
    assert [t.label for t in found.timings] == ["a fp32"]
    assert found.absent == [
        Absent("c fp32", "not installed"),
        Absent("b fp32", "RuntimeError: no luck"),
    ]
    assert "left out: b fp32 (RuntimeError: no luck)" in capsys.readouterr().out


def test_on_a_card_each_makes_way_for_the_next(monkeypatch):
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 77)
    alive: list[weakref.ref] = []

    def entries():
        for name in "abc":
            assert all(ref() is None for ref in alive)
            peer = Peer(name, [], raises_at=1 if name == "b" else None)
            alive.append(weakref.ref(peer))
            contender = Contender(peer, "fp32")
            del peer
            yield contender
            del contender

    found = race.one_by_one(entries(), itertools.repeat(IDS), rounds=2, steps=1)
    assert [(t.label, t.peak_bytes) for t in found.timings] == [("a fp32", 77), ("c fp32", 77)]
    assert [len(t.tokens_per_s) for t in found.timings] == [2, 2]
    assert found.absent == [Absent("b fp32", "RuntimeError: no luck")]


def test_ours_has_to_run():
    with pytest.raises(RuntimeError, match="no luck"):
        raced(Contender(Home("fastbrain", [], raises_at=1), "fp32"))


def timing(name: str, rate: float, precision: str = "fp32", ours: bool = False) -> Timing:
    return Timing(f"{name} {precision}", ours, precision, name, 3, [rate], [1.0])


def judged(*timings: Timing, precision: str = "fp32"):
    return training_step._judge(TRAINING["dense"], list(timings), precision, CPU)


def test_the_better_of_ours_is_held_against_the_fastest_peer(capsys):
    found, pair = judged(
        timing("fastbrain", 90.0, ours=True),
        timing("fastbrain graphs", 100.0, ours=True),
        timing("llama", 50.0),
        timing("compiled PyTorch", 80.0),
        timing("compiled PyTorch", 999.0, "bf16"),
    )
    assert found["wall"] == 100 / 80
    assert found["hugging_face"] == 100 / 50
    assert (found["ours"], found["peer"]) == ("fastbrain graphs fp32", "compiled PyTorch fp32")
    labels = ["fastbrain graphs fp32", "compiled PyTorch fp32", "llama fp32"]
    assert [t.label for t in pair] == labels
    # the goal is against Hugging Face
    assert "fastbrain graphs fp32 / llama fp32: 2.000, goal 0.97: met" in capsys.readouterr().out


def test_mixed_precision_has_to_beat_the_better_precision_of_a_peer():
    found, _ = judged(
        timing("fastbrain", 100.0, "bf16", ours=True),
        timing("fastbrain", 500.0, ours=True),
        timing("llama", 200.0),
        timing("llama", 50.0, "bf16"),
        precision="bf16",
    )
    assert (found["ours"], found["peer"]) == ("fastbrain bf16", "llama fp32")


def test_without_a_peer_there_is_no_ratio(capsys):
    assert judged(timing("fastbrain", 100.0, ours=True)) is None
    assert "no peer ran in fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "ratio", "verdict"),
    [
        (TRAINING["dense"], 0.97, "goal 0.97: met"),
        (TRAINING["moe"], 1.04, "goal 1.05: missed"),
        (TOY["moe"], 9.0, "a toy shape: no goal"),
        (CARD["moe"], 9.0, "no goal on a card"),
    ],
)
def test_goals_are_of_the_shapes_that_are_quoted(shape, ratio, verdict):
    assert training_step._verdict(shape, "fp32", ratio) == verdict


def test_the_models_of_a_card_are_those_that_its_tables_name():
    counts = {name: str(shape.config.parameter_counts()) for name, shape in CARD.items()}
    assert counts["dense"].startswith("101.7M total")
    assert counts["moe"].startswith("341.0M total / 199.4M active")


def test_everyone_who_can_run_here_is_lined_up(monkeypatch):
    labels = {
        entry.label if isinstance(entry, Contender) else entry
        for entry in line_up.line_up(TOY["dense"], ["fp32"], CPU)
    }
    assert {
        "fastbrain fp32",
        "compiled PyTorch fp32",
        Absent("fastbrain graphs fp32", "CUDA graphs need a CUDA device"),
    } <= labels
    monkeypatch.setattr(line_up.peers, "available", lambda: False)
    labels = set(line_up.line_up(TOY["dense"], ["fp32"], CPU))
    assert Absent("Hugging Face", line_up.peers.MISSING) in labels


def test_a_result_says_what_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        training_step,
        "line_up",
        lambda *_: iter(
            [
                Contender(Home("fastbrain", []), "fp32"),
                Absent("Hugging Face", "not installed"),
                Contender(Peer("llama", []), "fp32"),
            ]
        ),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = tmp_path / "step.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "--smoke", "--shape", "dense", "--rounds", "1", "--json", str(target)]
    )
    training_step.main()
    found = json.loads(target.read_text())
    assert found["kind"] == "training step"
    assert found["command"] == found["machine"]["command"]
    assert found["command"].startswith("python -m bench.training_step --smoke")
    assert {"commit", "date", "torch", "cpu"} <= found["machine"].keys()
    (result,) = found["results"]
    assert result["skipped"] == {"Hugging Face": "not installed"}
    assert set(result["tokens_per_s"]) == {"fastbrain fp32", "llama fp32"}
    assert result["ratio"]["fp32"]["peer"] == "llama fp32"
