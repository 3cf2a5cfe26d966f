"""The training program: the same bits, interrupted or not, and a directory worth keeping."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastbrain import cli, train
from fastbrain.lm import TransformerLm
from fastbrain.tokens import TokenFile
from fastbrain.training import chart, metrics
from fastbrain.training.loop import Trainer, step_batches

VOCAB = 61
BASE = """
[model]
vocab_size = 61
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 16
d_ff = 48
moe_d_ff = 16
num_experts = 3
experts_per_token = 2
moe_layers = []
max_seq_len = 32

[data]
train = "corpus.bin"
seq_len = 16

[train]
max_steps = 6
global_batch_size = 8
micro_batch_size = 8
learning_rate = 1e-2
max_norm = 0.5

[save]
interval_steps = 3

[eval]
interval = 3
samples = 1
"""

MOE = "model.moe_layers=[1]"
CASES = {
    "dense-f32": [],
    "moe-f32-accumulated": [MOE, "train.micro_batch_size=2"],
    "dense-bf16-accumulated": ["train.precision=bf16-mixed", "train.micro_batch_size=2"],
    "moe-bf16": [MOE, "train.precision=bf16-mixed"],
}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A directory with a configuration and a token file, entered; one thread, as in children."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.toml").write_text(BASE)
    ids = np.random.default_rng(0).integers(0, VOCAB, 2_000)
    TokenFile.write(folder / "corpus.bin", np.sort(ids.reshape(-1, 20), axis=1).reshape(-1))
    before, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(folder)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # a second of work that only one test looks at, in a process of its own
        patch.setattr(chart, "draw", lambda *_: "not drawn")
        yield folder
    torch.set_num_threads(threads)
    os.chdir(before)


def run(name: str, *overrides: str) -> int:
    return train.main(["tiny.toml", "--run", name, *overrides])


def checkpoint(name: str, step: int) -> Path:
    return Path(name) / "checkpoints" / f"step-{step:08d}"


def bits(name: str, step: int) -> tuple[bytes, bytes]:
    """Weights, and moments with the counter, of a checkpoint."""
    path = checkpoint(name, step)
    return (path / "model.safetensors").read_bytes(), (path / "optimizer.safetensors").read_bytes()


def numbers(name: str) -> list[tuple]:
    """What the history of a run says apart from clocks and starts."""
    keys = ("step", "loss", "aux_loss", "grad_norm", "learning_rate", "tokens", "val_loss")
    return [
        tuple(row.get(key) for key in keys) for row in metrics.read(Path(name, "metrics.jsonl"))
    ]


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
        for step in (0, 1, 77):
            batches = list(step_batches(tokens, step, 16, micro, 16))
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


def test_the_first_steps_are_those_of_the_public_interface():
    """The program is the chapter's loop: no more than these calls."""
    from fastbrain.config import TransformerConfig
    from fastbrain.optim import Optimizer
    from fastbrain.schedule import Schedule

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


def test_a_checkpoint_holds_what_others_need_to_read_it():
    assert run("kept", MOE, "data.train=corpus.bin") == 0
    path = checkpoint("kept", 6)
    weights = load_file(path / "model.safetensors")
    moments = load_file(path / "optimizer.safetensors")
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert weight.ndim == (1 if name.endswith("norm.weight") else 2), name
        for moment in ("moment1", "moment2"):
            assert moments[f"{name}.{moment}"].shape == weight.shape
    assert len(moments) == 2 * len(weights) + 1
    assert moments["updates"].equal(torch.tensor(6))
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in weights
    config = json.loads((path / "config.json").read_bytes())
    assert config["model_type"] == "fastbrain_moe"
    assert config["fastbrain"]["moe_layers"] == [1]
    state = json.loads((path / "trainer_state.json").read_bytes())
    assert (state["step"], state["updates"], state["tokens_seen"]) == (6, 6, 6 * 8 * 16)
    assert state["data"]["train"]["tokens"] == 2_000
    assert state["data"]["train"]["max_id"] <= VOCAB - 1
    assert state["best"]["step"] in (3, 6)
    assert {
        "format_version", "run_id", "config", "config_sha256", "guard", "tokenizer_sha256",
        "versions", "threads", "tile_table_sha256", "world_size", "micro_batch_size",
    } <= set(state)  # fmt: skip


@pytest.fixture(scope="module")
def told(home):
    """A run from text, with the tokenizer trained on the way: its name, and what it printed."""
    import pydoc_data.topics

    Path("text.jsonl").write_text(
        "".join(
            json.dumps({"text": text}) + "\n"
            for text in list(pydoc_data.topics.topics.values())[:20]
        )
    )
    options = ["data.train=text.jsonl", "model.vocab_size=none", "eval.interval=6", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fastbrain", "train", "tiny.toml", "--run", "told", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_text_becomes_a_run_with_everything_in_it(told):
    summary = json.loads(told.stdout)
    assert (summary["step"], summary["steps"], summary["skipped"]) == (6, 6, 0)
    assert summary["val_loss"] == summary["best_val_loss"]
    assert sorted(os.listdir("told")) == [
        "checkpoints", "config.toml", "data", "loss.png", "metrics.jsonl", "samples",
    ]  # fmt: skip
    assert sorted(os.listdir(summary["checkpoint"])) == [
        "MANIFEST.json", "config.json", "generation_config.json", "model.safetensors",
        "optimizer.safetensors", "tokenizer.json", "tokenizer_config.json", "trainer_state.json",
    ]  # fmt: skip
    assert Path("told/samples/step-00000006.txt").read_text().startswith("[")
    assert "held-out loss" in told.stderr
    assert "sample: [" in told.stderr
    rows = metrics.read(Path("told/metrics.jsonl"))
    assert set(rows[0]) == {
        "step", "start", "time_s", "loss", "aux_loss", "grad_norm", "learning_rate", "tokens",
        "tokens_per_s", "peak_bytes", "skipped",
    }  # fmt: skip
    score = rows[-1]
    assert set(score) == {"step", "start", "val_loss", "perplexity", "bits_per_byte"}
    assert score["perplexity"] == pytest.approx(math.exp(score["val_loss"]))
    # about 4 bytes a token, and 4,096 tokens at most
    assert score["val_loss"] / math.log(2) / 6 < score["bits_per_byte"] < 12


def test_a_dense_checkpoint_loads_in_transformers_as_it_is(told):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    path = json.loads(told.stdout)["checkpoint"]
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token == "<|endoftext|>"
    ids = tokenizer("The value of an expression", return_tensors="pt").input_ids
    assert theirs(ids).logits.isfinite().all()


def test_a_run_is_not_begun_twice(capsys):
    assert run("twice") == 0
    assert run("twice") == 2
    said = capsys.readouterr().err
    assert "there is a run at twice already: go on with it by adding --resume auto" in said
    before = Path("twice/metrics.jsonl").read_bytes()
    assert run("twice", "--resume", "auto") == 0, "a finished run has nothing to do"
    assert Path("twice/metrics.jsonl").read_bytes() == before
    assert run("twice", "--resume", "auto", "train.seed=1") == 2
    assert "train.seed was 42 and is now 1" in capsys.readouterr().err


def test_resume_auto_begins_where_there_is_nothing():
    assert run("fresh", "--resume", "auto") == 0
    assert checkpoint("fresh", 6).is_dir()


def test_another_model_or_file_under_a_checkpoint_is_refused(capsys):
    assert run("altered") == 0
    state = checkpoint("altered", 6) / "trainer_state.json"
    shutil.rmtree(checkpoint("altered", 6))
    for was, now, named in (
        ("d_ff = 48", "d_ff = 40", "is (48, 32) in the file and (40, 32) in the model"),
        ("seed = 42", "seed = 43", "another seed: 42 there, 43 here"),
    ):
        config = Path("altered/config.toml")
        before = config.read_text()
        config.write_text(before.replace(was, now))
        assert cli.main(["resume", "altered"]) == 2
        assert named in capsys.readouterr().err
        config.write_text(before)
    other = np.zeros(2_000, np.uint32)
    Path("other.bin").write_bytes(other.tobytes())
    corpus = Path("altered/data/corpus.json")
    corpus.write_text(
        corpus.read_text().replace(str(Path("corpus.bin").absolute()), "../../other.bin")
    )
    assert cli.main(["resume", "altered"]) == 2
    assert "is not the file that this run began with" in capsys.readouterr().err
    assert not state.exists()


def test_damage_falls_back_and_nothing_intact_is_exit_3(capsys):
    assert run("damaged") == 0
    whole = bits("damaged", 6)
    os.truncate(checkpoint("damaged", 6) / "model.safetensors", 100)
    assert cli.main(["resume", "damaged"]) == 0
    assert "model.safetensors has 100 bytes and should have" in capsys.readouterr().out
    assert bits("damaged", 6) == whole
    for step in (3, 6):
        os.truncate(checkpoint("damaged", step) / "model.safetensors", 100)
    assert cli.main(["resume", "damaged"]) == 3
    assert "damaged has no intact checkpoint" in capsys.readouterr().err


def test_going_back_trains_the_steps_again():
    assert run("back") == 0
    whole = bits("back", 6)
    assert cli.main(["resume", "back", "--step", "3"]) == 0
    assert bits("back", 6) == whole
    assert {row["start"] for row in metrics.read(Path("back/metrics.jsonl"))} == {1, 2}
    assert sorted(os.listdir("back/checkpoints")) == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_once_and_the_run_can_go_on(monkeypatch, capsys, number):
    name = f"stopped-{number}"
    step = Trainer._train_step

    def interrupted(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", interrupted)
        assert run(name) == 75
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert f"fastbrain resume {name}" in capsys.readouterr().out
    assert [path.name for path in Path(name, "checkpoints").iterdir()] == ["step-00000002"]
    assert cli.main(["resume", name]) == 0
    assert run(f"{name}-whole") == 0
    assert bits(name, 6) == bits(f"{name}-whole", 6)


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


@pytest.mark.parametrize("position", [0, 1_000, 1_999])
def test_an_id_outside_the_vocabulary_is_refused_before_the_first_step(capsys, position):
    ids = np.fromfile("corpus.bin", np.uint32)
    ids[position] = VOCAB
    TokenFile.write("poked.bin", ids)
    assert run(f"poked-{position}", "data.train=poked.bin") == 2
    assert "token id 61 is outside the vocabulary of 61" in capsys.readouterr().err
    assert not Path(f"poked-{position}/config.toml").exists()


REFUSED_FILES = {
    "empty.bin": (b"", "empty"),
    "odd.bin": (bytes(5), "5 bytes"),
    "short.bin": (bytes(4 * 20), "fewer than one window of data.seq_len 16"),
    "text.bin": (b"this is plain text. " * 50, "text"),
    "blank.txt": (b" \n", "no text"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": 1}\n', "line 2"),
    "what.csv": (b"a,b\n", "what.csv"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_a_file_that_cannot_be_trained_on_is_refused_in_prose(capsys, name):
    content, named = REFUSED_FILES[name]
    Path(name).write_bytes(content)
    vocabulary = [] if name.endswith(".bin") else ["model.vocab_size=none"]
    assert run(f"run-{name}", f"data.train={name}", *vocabulary) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_a_token_file_must_come_with_its_vocabulary(capsys):
    assert run("unknown", "model.vocab_size=none") == 2
    assert "give data.tokenizer" in capsys.readouterr().err


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(told, capsys):
    tokenizer = "data.tokenizer=told/data/tokenizer.json"
    assert run("narrow", tokenizer, "data.train=text.jsonl") == 2
    assert "model.vocab_size is 61, and the tokenizer has" in capsys.readouterr().err


def test_a_held_out_file_is_scored_whole(capsys):
    ids = np.fromfile("corpus.bin", np.uint32)[:163]
    TokenFile.write("held.bin", ids)
    assert run("held", "data.validation=held.bin") == 0
    assert "2,000 to train on, 163 held out" in capsys.readouterr().out
    [score] = [row for row in metrics.read(Path("held/metrics.jsonl")) if row.get("val_loss")][-1:]
    saved = load_file(checkpoint("held", 6) / "model.safetensors")
    model = TransformerLm(_config("held"), seed=0)
    for name, weight in model.weights():
        weight.copy_(saved[name].reshape(weight.shape))
    with TokenFile.open("held.bin", 0) as tokens:
        assert float(model.evaluate_file(tokens, 8, 16).lm_loss) == score["val_loss"]
    assert score["bits_per_byte"] is None


def _config(name: str):
    from fastbrain.training.run_dir import RunDir
    from fastbrain.training.settings import Settings

    return Settings.from_tables(RunDir.open(Path(name)).tables).config(VOCAB)


def test_a_model_too_large_for_the_machine_is_refused_before_it_is_made(capsys):
    assert run("huge", "model.d_ff=2000000000") == 2
    assert "GB for weights, gradients and moments; this machine has" in capsys.readouterr().err
