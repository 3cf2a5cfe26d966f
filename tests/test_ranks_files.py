"""Ranks write the files that one process writes, and read them: of parts, and of adapters."""

import json
import shutil
from pathlib import Path

import pytest
from instruction_runs import base, pairs
from ranks import needs_fork, results
from training_runs import bits, entered, numbers

pytestmark = needs_fork

slow = pytest.mark.slow
MOE, BF16 = "model.moe_layers=[1]", "train.precision=bf16-mixed"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("files")) as folder:
        base(folder / "dense")
        base(folder / "moe", moe=True)
        pairs(folder / "pairs.jsonl")
        yield folder


def command(*words: str, ranks: int = 1, job: str = "commands") -> None:
    for [found] in results(f"agreement_jobs:{job}", [words], ranks=ranks):
        assert found["code"] == 0


@pytest.mark.parametrize(
    ("ranks", "parallel", "case"),
    [
        # neither 61 rows of the embedding nor 3 experts can be divided evenly
        (2, "fsdp", "moe"),
        pytest.param(4, "fsdp", "moe", marks=slow),
        pytest.param(4, "fsdp", "dense", marks=slow),
        pytest.param(2, "ddp", "moe", marks=slow),
    ],
)
def test_files_of_the_same_weights_and_moments_have_the_same_bytes(ranks, parallel, case):
    alone, shared = f"alone-{case}-{ranks}{parallel}", f"shared-{case}-{ranks}{parallel}"
    options = ["save.keep=9", "eval.samples=0", "train.micro_batch_size=2"]
    command("train", "tiny.toml", "--run", alone, *options, *([MOE] if case == "moe" else []))
    shutil.copytree(alone, shared)
    # they read step 3, change nothing, and write it as step 6
    more = [f"train.parallel={parallel}"]
    command("resume", shared, "--step", "3", *more, ranks=ranks, job="unchanged")
    assert bits(shared, 6) == bits(alone, 3)
    assert bits(shared, 6) != bits(alone, 6)
    state = json.loads(Path(shared, "checkpoints/step-00000006/trainer_state.json").read_text())
    assert (state["world_size"], state["parallel"]) == (ranks, parallel)


SFT = [
    "data.seq_len=48", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.learning_rate=1e-3", "train.max_steps=8", "save.interval_steps=4", "eval.interval=4",
    "eval.samples=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "model", "more"),
    [
        pytest.param("fsdp", "dense", [], marks=slow),
        pytest.param("ddp", "dense", [], marks=slow),
        pytest.param("fsdp", "moe", [BF16], marks=slow),
        pytest.param("ddp", "moe", [BF16], marks=slow),
    ],
)
def test_adapters_train_on_ranks_as_alone_and_resume_with_the_same_bits(parallel, model, more):
    names = [f"{each}-{parallel}-{model}" for each in ("sft-1", "sft-2", "sft-again")]
    line = ["pairs.jsonl", *SFT, "--lora-rank=4", f"train.parallel={parallel}", *more]
    command("sft", model, "--run", names[0], *line)
    command("sft", model, "--run", names[1], *line, ranks=2)
    shutil.copytree(names[1], names[2])
    command("resume", names[2], "--step", "4", ranks=2)
    alone, shared, again = map(numbers, names)
    assert len(alone) == len(shared) >= 8
    tolerance = 2e-3 if more else 1e-6
    for ours, theirs in zip(shared, alone, strict=True):
        for key in (1, 6):  # of the step, and held out
            assert ours[key] == (theirs[key] and pytest.approx(theirs[key], rel=tolerance))
    assert again == shared
    assert bits(names[2], 8) == bits(names[1], 8)
    assert bits(names[1], 8) != bits(names[1], 4)
    # what was frozen is what it was
    frozen = [tensor_bytes(Path(name), 8) for name in names]
    assert frozen[0] == frozen[1] == frozen[2] == tensor_bytes(Path(names[0]), 4)


def tensor_bytes(run: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint's model that are not of an adapter."""
    content = (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    return {
        name: data[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name != "__metadata__" and "lora_" not in name
    }
