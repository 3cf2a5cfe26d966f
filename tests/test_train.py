"""The training program: the same bits, interrupted or not, split this way or that."""

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import VOCAB, bits, checkpoint, entered, numbers, run

from fastbrain import cli
from fastbrain.config import TransformerConfig
from fastbrain.lm import TransformerLm
from fastbrain.optim import Optimizer
from fastbrain.schedule import Schedule
from fastbrain.tokens import TokenFile
from fastbrain.training import metrics
from fastbrain.training.corpus import TextCorpus

MOE = "model.moe_layers=[1]"
CASES = {
    "dense-f32": [],
    "moe-f32-accumulated": [MOE, "train.micro_batch_size=2"],
    "dense-bf16-accumulated": ["train.precision=bf16-mixed", "train.micro_batch_size=2"],
    "moe-bf16": [MOE, "train.precision=bf16-mixed"],
}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


@pytest.fixture(scope="module")
def resumed(home):
    """Every case run whole, and its copy resumed from the middle by a new process."""
    with warnings.catch_warnings():
        # BF16 is slow on some CPUs, which is said once
        warnings.simplefilter("ignore")
        for name, overrides in CASES.items():
            assert run(name, *overrides) == 0
            shutil.copytree(name, f"{name}-resumed")
            shutil.rmtree(checkpoint(f"{name}-resumed", 6))
    script = f"""
import torch
from fastbrain.cli import main
torch.set_num_threads(1)
for name in {list(CASES)}:
    assert main(["resume", name + "-resumed"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_in_the_same_bits(resumed, case):
    assert bits(f"{case}-resumed", 6) == bits(case, 6)
    assert bits(case, 3) != bits(case, 6)
    assert numbers(f"{case}-resumed") == numbers(case)
    rows = metrics.read(Path(f"{case}-resumed", "metrics.jsonl"))
    assert [row["start"] for row in rows if "loss" in row] == [1, 1, 1, 2, 2, 2]
    assert any(row["grad_norm"] > 0.5 for row in rows if "loss" in row), "nothing was clipped"
    assert "going on from" in resumed


def test_a_run_that_never_saved_begins_again_with_the_same_bits():
    assert run("whole") == 0
    shutil.copytree("whole", "unsaved")
    shutil.rmtree("unsaved/checkpoints")
    os.mkdir("unsaved/checkpoints")
    assert cli.main(["resume", "unsaved"]) == 0
    assert bits("unsaved", 6) == bits("whole", 6)
    assert numbers("unsaved") == numbers("whole")


def test_looking_at_a_model_does_not_change_it():
    assert run("watched", "eval.interval=1", "eval.samples=3", "save.interval_steps=1") == 0
    assert run("alone", "eval.interval=6", "eval.samples=0", "save.interval_steps=6") == 0
    assert bits("watched", 6) == bits("alone", 6)


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_rows_do_not_depend_on_how_a_step_is_split(micro):
    with TokenFile.open("corpus.bin", 42) as tokens:
        corpus = TextCorpus(None, {}, [], None, 16, tokens, tokens)
        for step in (0, 1, 77):
            batches = list(corpus.step_batches(step, 16, micro))
            assert len(batches) == 16 // micro
            together = torch.cat([batch.ids for batch in batches])
            assert together.equal(tokens.batch(step, 16, 16).ids)


def test_losses_hardly_depend_on_how_a_step_is_split():
    for micro in (8, 4, 1):
        options = [f"train.micro_batch_size={micro}", "train.learning_rate=1e-3"]
        assert run(f"split-{micro}", *options) == 0
    for micro in (4, 1):
        for ours, whole in zip(numbers(f"split-{micro}"), numbers("split-8"), strict=True):
            assert ours[0] == whole[0]
            assert ours[1] == whole[1] or math.isclose(ours[1], whole[1], rel_tol=1e-6)
            assert ours[3] == whole[3] or math.isclose(ours[3], whole[3], rel_tol=1e-5)


# BF16 warns that it is slow here; "moe" until a route first differs, and rows alone from there
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this CPU has no BF16 instructions")
@pytest.mark.parametrize(
    ("kind", "precision", "relative"),
    [("dense", "f32", 1e-6), ("dense", "bf16-mixed", 2e-3), ("moe", "f32", 1e-6)],
)
def test_a_hundred_steps_hardly_depend_on_the_split_even_when_it_changes(kind, precision, relative):
    options = [
        "train.global_batch_size=16", "train.learning_rate=1e-3", "train.max_steps=100",
        f"train.precision={precision}", "eval.interval=100", "eval.samples=0",
        "save.interval_steps=50", 
    ]  # fmt: skip
    if kind == "moe":
        # its auxiliary losses are of a micro-batch's statistics, so they do depend on the split
        options += [MOE, "model.aux_loss_weight=0", "model.router_z_loss_weight=0"]
    found = {}
    for micro in (16, 8, 4):
        name = f"hundred-{kind}-{precision}-{micro}"
        assert run(name, *options, f"train.micro_batch_size={micro}") == 0
        found[micro] = [row[1] for row in numbers(name) if row[1] is not None]
    # and once with a split that changes on the way
    name = f"hundred-{kind}-{precision}-16"
    assert cli.main(["resume", name, "--step", "50", "train.micro_batch_size=2"]) == 0
    found[2] = [row[1] for row in numbers(name) if row[1] is not None]
    for micro in (8, 4, 2):
        pairs = list(zip(found[micro], found[16], strict=True))
        assert len(pairs) == 100
        if kind == "moe":
            pairs = pairs[:10]
        for ours, whole in pairs:
            assert math.isclose(ours, whole, rel_tol=relative), micro


def test_the_first_steps_are_those_of_the_public_interface():
    """The program is the chapter's loop: no more than these calls."""
    # so large a norm clips nothing, or a wrong weight of a micro-batch would go unseen
    options = ["train.micro_batch_size=4", "train.warmup_steps=3", "train.max_norm=1e6"]
    assert run("program", "save.interval_steps=2", *options) == 0
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
        moe_d_ff=16, num_experts=3, moe_layers=(), max_seq_len=32,
    )  # fmt: skip
    adam = Optimizer.adam(1e-2, betas=(0.9, 0.95), weight_decay=0.1, decay_vectors=False)
    model = TransformerLm(config, adam, seed=42)
    schedule = Schedule.warmup_cosine(1e-2, 3, 6).floor(0.1)
    with TokenFile.open("corpus.bin", 42, (0, 1_900)) as tokens:
        for step in range(2):
            model.set_learning_rate(schedule.rate(step))
            batch = tokens.batch(step, 8, 16)
            for first in (0, 4):
                model.accumulate_step(batch.slice(first, first + 4), weight=0.5)
            model.step_clipped(1.0, 1e6)
    saved = load_file(checkpoint("program", 2) / "model.safetensors")
    assert list(saved) != []
    for name, weight in model.weights():
        assert saved[name].equal(weight.reshape(saved[name].shape)), name


def test_going_back_trains_the_steps_again():
    assert run("back") == 0
    whole = bits("back", 6)
    assert cli.main(["resume", "back", "--step", "3"]) == 0
    assert bits("back", 6) == whole
    assert {row["start"] for row in metrics.read(Path("back/metrics.jsonl"))} == {1, 2}
    assert sorted(os.listdir("back/checkpoints")) == ["step-00000003", "step-00000006"]


def test_an_evaluation_that_a_kill_lost_is_repeated():
    assert run("lost") == 0
    whole = numbers("lost")
    shutil.rmtree(checkpoint("lost", 6))
    lines = Path("lost/metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    assert "val_loss" not in "".join(lines)
    Path("lost/metrics.jsonl").write_text("".join(lines))
    assert cli.main(["resume", "lost"]) == 0
    assert numbers("lost") == whole
    # a kill between an evaluation and its samples loses those alone
    sample = Path("lost/samples/step-00000006.txt")
    text = sample.read_bytes()
    sample.unlink()
    assert cli.main(["resume", "lost"]) == 0
    assert sample.read_bytes() == text
    assert numbers("lost") == whole


def test_time_that_is_up_stops_and_can_go_on():
    assert run("timed", "train.max_time=0.001s") == 75
    assert checkpoint("timed", 1).is_dir()
    assert cli.main(["resume", "timed", "train.max_time=1h"]) == 0
    assert checkpoint("timed", 6).is_dir()


def poison(monkeypatch, steps: range) -> None:
    """Make the gradient of these steps, counted from 0, not a number."""
    accumulate = TransformerLm.accumulate_step
    calls = iter(range(1_000))

    def poisoned(model, batch, **options):
        losses = accumulate(model, batch, **options)
        if next(calls) in steps:
            next(model.module.parameters()).grad[0, 0] = math.nan
        return losses

    monkeypatch.setattr(TransformerLm, "accumulate_step", poisoned)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(monkeypatch):
    poison(monkeypatch, range(1, 3))
    assert run("skipped") == 0
    rows = [row for row in metrics.read(Path("skipped/metrics.jsonl")) if "loss" in row]
    assert [row["skipped"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, False, False, False]
    state = json.loads((checkpoint("skipped", 6) / "trainer_state.json").read_bytes())
    assert (state["step"], state["updates"]) == (6, 4)


def test_nothing_but_skips_ends_a_run(monkeypatch, capsys):
    poison(monkeypatch, range(3, 1_000))
    assert run("diverged", "train.max_steps=60") == 1
    said = capsys.readouterr().err
    assert "the gradient was not finite in the last" in said
    assert "fastbrain resume diverged" in said
    assert "Traceback" not in said
