"""What is not a number costs its step and nothing else; bad text gives the same log every time."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import VOCAB, bits, checkpoint, entered, numbers, run

from fastbrain import cli
from fastbrain.lm import TransformerLm
from fastbrain.tokens import TokenFile
from fastbrain.training import guard_log, metrics

# BF16 is slow on some CPUs, which is said once
pytestmark = pytest.mark.filterwarnings("ignore:.*BF16")

STEPS, SPLIT = 6, 4
SETTINGS = ["train.micro_batch_size=2", "save.interval_steps=6", "eval.interval=6"]
SETTINGS += ["eval.samples=0"]
MOE = "model.moe_layers=[1]"
CASES = {
    "dense-f32": [],
    "moe-f32": [MOE],
    "dense-bf16": ["train.precision=bf16-mixed"],
    "moe-bf16": [MOE, "train.precision=bf16-mixed"],
}
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


def fresh(name: str) -> str:
    shutil.rmtree(name, ignore_errors=True)
    return name


@pytest.fixture(scope="module")
def left_out(home):
    """The bits at the end of a run whose update of one step is left out, by case and step."""
    found = {}

    def bits_of(case: str, step: int) -> tuple[bytes, bytes]:
        if (case, step) not in found:
            clip, steps = TransformerLm.step_clipped, iter(range(STEPS))

            def skipping(model, *arguments):
                if next(steps) != step:
                    return clip(model, *arguments)
                norm = model.grad_norm()
                model.zero_grad()
                return norm

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TransformerLm, "step_clipped", skipping)
                assert run(fresh("left-out"), *CASES[case], *SETTINGS) == 0
            assert not guard_log.read(Path("left-out/guard.jsonl"))
            found[case, step] = bits("left-out", STEPS)
        return found[case, step]

    return bits_of


def poison(monkeypatch, step: int, micro: int, where: str, value: float) -> None:
    """Put `value` into the loss, or one element of the gradient, of a micro-batch of a step."""
    accumulate, calls = TransformerLm.accumulate_step, iter(range(STEPS * SPLIT))

    def poisoned(model, batch, **options):
        losses = accumulate(model, batch, **options)
        if next(calls) == step * SPLIT + micro:
            if where == "loss":
                bad = torch.full_like(losses.lm_loss_sum, value)
                return dataclasses.replace(losses, lm_loss_sum=bad)
            gradients = [p.grad for p in model.module.parameters()]
            gradients[0 if where == "first" else -1].view(-1)[-1] = value
        return losses

    monkeypatch.setattr(TransformerLm, "accumulate_step", poisoned)


def assert_one_skip(name: str, step: int) -> dict:
    [row] = guard_log.read(Path(name, "guard.jsonl"))
    assert (row["kind"], row["step"], row["data_step"]) == ("skip", step + 1, step)
    rows = [row for row in metrics.read(Path(name, "metrics.jsonl")) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["skipped"] for row in rows] == [int(i >= step) for i in range(STEPS)]
    return row


@pytest.mark.parametrize("case", ["dense-f32", "moe-bf16"])
@pytest.mark.parametrize(
    ("where", "value"), [("loss", NAN), ("loss", INF), ("first", NAN), ("last", -INF)]
)
def test_a_step_that_is_not_a_number_is_as_if_its_update_had_been_left_out(
    monkeypatch, left_out, case, where, value
):
    expected = left_out(case, 2)
    poison(monkeypatch, step=2, micro=1, where=where, value=value)
    assert run(fresh("poisoned"), *CASES[case], *SETTINGS) == 0
    row = assert_one_skip("poisoned", 2)
    assert bits("poisoned", STEPS) == expected
    if where == "loss":
        assert row["micro"] == 1
        assert row["loss"] is None
        with TokenFile.open("corpus.bin", 42, (0, 1_900)) as tokens:
            assert row["offsets"] == tokens.offsets(2, 8, 16).tolist()
        assert [each["row"] for each in row["rows"]] == [2, 3]
    else:
        assert row["grad_norm"] is None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_step_micro_batch_and_tensor_may_be_poisoned(left_out, case):
    places = product(range(STEPS), range(SPLIT), ("loss", "first", "last"))
    for count, (step, micro, where) in enumerate(places):
        expected = left_out(case, step)
        value = (NAN, INF, -INF)[count % 3]
        with pytest.MonkeyPatch.context() as patch:
            poison(patch, step, micro, where, value)
            assert run(fresh("poisoned"), *CASES[case], *SETTINGS) == 0
        assert_one_skip("poisoned", step)
        assert bits("poisoned", STEPS) == expected, (step, micro, where, value)


# A corpus of one short pattern, soon learned, with noise in its middle; BAD is of the noise alone.
BAD = VOCAB - 1
# where: of the one some rows are read late, of the other three steps in a row read some, twice
NOISE = {"skip": (11_200, 11_400), "rollback": (4_000, 5_400)}
POLICIES = [pytest.param("skip", marks=pytest.mark.slow), "rollback"]
TOTAL = 64
LONG = [
    f"train.max_steps={TOTAL}", "train.global_batch_size=4",
    "train.micro_batch_size=2", "train.learning_rate=3e-2", "save.interval_steps=16",
    "eval.interval=32", "eval.samples=0",
]  # fmt: skip
# Each leg is a run that kills its own process in the middle of a step, without any goodbye.
KILLED = """
import json, os, signal, sys
import torch
sys.path.insert(0, sys.argv[1])
from test_guard_rows import spoiled_by_text
from fastbrain import train
from fastbrain.lm import TransformerLm
torch.set_num_threads(1)
for name, options, calls in json.loads(sys.argv[2]):
    pid = os.fork()
    if pid == 0:
        try:
            step = spoiled_by_text(TransformerLm.accumulate_step, "rollback" in " ".join(options))
            left = iter(range(calls))
            def dying(model, batch, **named):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(model, batch, **named)
            TransformerLm.accumulate_step = dying
            train.main(["tiny.toml", "--run", name, "--json", *options])
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
"""


def spoiled_by_text(accumulate, fatal: bool):
    """`accumulate_step` as it is, or with a loss that overflows on text that has the bad id."""

    def spoiled(model, batch, **options):
        losses = accumulate(model, batch, **options)
        if fatal and bool((batch.ids == BAD).any()):
            bad = torch.full_like(losses.lm_loss_sum, math.inf)
            return dataclasses.replace(losses, lm_loss_sum=bad)
        return losses

    return spoiled


@pytest.fixture(scope="module")
def mixed(home):
    for policy, (first, end) in NOISE.items():
        ids = np.arange(20_000) % 4
        ids[first:end] = np.random.default_rng(0).integers(0, BAD, end - first)
        ids[first:end:8] = BAD
        TokenFile.write(f"{policy}.bin", ids)


def resumed_after_kills(monkeypatch, policy: str, kills: list[int]) -> None:
    """One run whole, and for each kill one that is killed there and resumed; all must agree."""
    fatal, (first, end) = policy == "rollback", NOISE[policy]
    options = [*LONG, f"data.train={policy}.bin", f"guard.policy={policy}"]
    spoiled = spoiled_by_text(TransformerLm.accumulate_step, fatal)
    monkeypatch.setattr(TransformerLm, "accumulate_step", spoiled)
    whole = f"{policy}-whole"
    assert run(fresh(whole), *options) == 0
    log = read_log(whole)
    found = {row["kind"] for row in log}
    assert found >= ({"skip", "rollback"} if fatal else {"spike"}), found
    steps = [row for row in log if row["kind"] != "rollback"]
    bad = [row for row in steps if any(first - 16 < at < end for at in row["offsets"])]
    assert len(bad) > len(steps) / 2
    assert all(len(row["rows"]) == 2 for row in steps)
    legs = [[fresh(f"{policy}-killed-{calls}"), options, calls] for calls in kills]
    tests = str(Path(__file__).parent)
    arguments = [tests, json.dumps(legs)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name, _, calls in legs:
        assert not checkpoint(name, TOTAL).exists()
        assert cli.main(["resume", name]) == 0
        assert read_log(name) == log, f"killed at call {calls}"
        assert numbers(name) == numbers(whole), f"killed at call {calls}"
        assert bits(name, TOTAL) == bits(whole, TOTAL), f"killed at call {calls}"


def read_log(name: str) -> list[dict]:
    return [
        {key: value for key, value in row.items() if key != "start"}
        for row in guard_log.read(Path(name, "guard.jsonl"))
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills children of its own making")
@pytest.mark.parametrize("policy", POLICIES)
def test_bad_text_gives_the_same_log_after_a_kill(monkeypatch, mixed, policy):
    resumed_after_kills(monkeypatch, policy, [2 * 45 + 1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills children of its own making")
@pytest.mark.parametrize("policy", NOISE)
def test_bad_text_gives_the_same_log_wherever_the_kill_falls(monkeypatch, mixed, policy):
    resumed_after_kills(monkeypatch, policy, [*range(3, 2 * TOTAL, 7)])


def test_a_run_that_only_rolls_back_comes_to_an_end(monkeypatch, capsys):
    accumulate, calls = TransformerLm.accumulate_step, iter(range(60))

    def overflowing(model, batch, **options):
        next(calls)  # ends an endless run
        losses = accumulate(model, batch, **options)
        bad = torch.full_like(losses.lm_loss_sum, INF)
        return dataclasses.replace(losses, lm_loss_sum=bad)

    monkeypatch.setattr(TransformerLm, "accumulate_step", overflowing)
    assert run("endless", "guard.policy=rollback") == 1
    assert "after 3 rollbacks" in capsys.readouterr().err
