"""Several ranks go on from what the first one finds, with instructions and adapters as well."""

import os
import re
from pathlib import Path

import pytest
from fault_jobs import words
from instruction_runs import base, pairs
from ranks import Rank, needs_fork, together
from training_runs import bits, checkpoint, entered, numbers

from bench.campaigns import runs
from fastbrain import cli
from fastbrain.formats.safetensors_file import check_safetensors_header
from fastbrain.training import metrics

pytestmark = needs_fork

SETTINGS = (
    "data.seq_len=48",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.learning_rate=1e-2",
    "train.max_steps=6",
    "save.interval_steps=3",
    "eval.interval=3",
    "eval.samples=1",
)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("resume")) as folder:
        base(folder / "dense")
        pairs(folder / "pairs.jsonl")
        yield folder


def ended(found: list[Rank], code: int = 0) -> list[Rank]:
    """All ranks, each of which must have ended with this code."""
    assert [each.code for each in found] == [code] * len(found), found
    return found


def tuned(name: str, *more: str) -> list[str]:
    return ["sft", "dense", "pairs.jsonl", "--run", name, *SETTINGS, *more]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_adapters_are_trained_on_instructions_stopped_and_resumed_to_the_bit(parallel):
    more = ("--lora-rank=4", f"train.parallel={parallel}")
    name, again = f"whole-{parallel}", f"stopped-{parallel}"
    first, other = ended(together("fault_jobs:program", tuned(name, *more)))
    assert "beginning from " in first.out
    assert (other.out, other.err) == ("", "")
    faults = [(1, "step", 2, "TERM")]
    ended(together("fault_jobs:program", tuned(again, *more), faults), 75)
    ended(together("fault_jobs:program", ["resume", again]))
    runs.require_same(Path(again), runs.end(Path(name)))
    # adapters alone have moments
    held = check_safetensors_header(checkpoint(name, 6) / "optimizer.safetensors")
    assert {re.sub(r".*(lora_[AB]|updates).*", r"\1", each) for each in held} == {
        "lora_A", "lora_B", "updates",
    }  # fmt: skip
    losses = [row["loss"] for row in metrics.read(Path(name, "metrics.jsonl")) if "loss" in row]
    assert losses[-1] < losses[0]
    # rows and losses are those of one process
    assert cli.main(tuned("alone-" + parallel, "--lora-rank=4")) == 0
    alone = [row[1] for row in numbers("alone-" + parallel) if row[1] is not None]
    assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_put_aside_once_and_all_go_on_from_the_one_before():
    ended(together("fault_jobs:program", words("whole")))
    ended(together("fault_jobs:program", words("damaged", "save.keep=9")))
    for step, name in ((6, "model.safetensors"), (4, "optimizer.safetensors")):
        os.truncate(checkpoint("damaged", step) / name, 9)
    first, other = ended(together("fault_jobs:program", ["resume", "damaged"]))
    assert first.out.count("refused ") == 2
    assert "going on from" in first.out
    assert other.err == ""
    assert bits("damaged", 6) == bits("whole", 6)
    aside = sorted(path.name for path in Path("damaged/checkpoints").glob("*.corrupt"))
    assert aside == ["step-00000004.corrupt", "step-00000006.corrupt"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_go_back_to_a_step_that_is_asked_for(parallel):
    name = f"back-{parallel}"
    begin = words(name, "save.keep=9", parallel=parallel)
    ended(together("fault_jobs:program", begin))
    before = runs.end(Path(name))
    ended(together("fault_jobs:program", ["resume", name, "--step", "2"]))
    assert runs.end(Path(name)) == before
    # asked for again, there is nothing left to do
    ended(together("fault_jobs:program", [*begin, "--resume", "auto"]))
    assert runs.end(Path(name)) == before
    override = ["resume", name, "--step", "4", "--override", "train.learning_rate=1e-3"]
    first, other = ended(together("fault_jobs:program", override))
    assert "train.learning_rate was 0.01 and is now 0.001" in first.out
    assert other.err == ""
    assert runs.end(Path(name)).weights != before.weights
