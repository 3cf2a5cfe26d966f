"""What a run leaves behind, and that others can read it."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_runs import VOCAB, checkpoint, entered, run

from fastbrain.lm import TransformerLm
from fastbrain.tokens import TokenFile
from fastbrain.training import evaluation, metrics
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings

MOE = "model.moe_layers=[1]"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("training")) as folder:
        yield folder


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
    picture = ["loss.png"] if find_spec("matplotlib") else []
    assert sorted(os.listdir("told")) == [
        "checkpoints", "config.toml", "data", "guard.jsonl", *picture, "metrics.jsonl", "run.lock",
        "samples",
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


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(told, capsys):
    tokenizer = "data.tokenizer=told/data/tokenizer.json"
    assert run("narrow", tokenizer, "data.train=text.jsonl") == 2
    assert "model.vocab_size is 61, and the tokenizer has" in capsys.readouterr().err


def test_the_best_so_far_is_saved_and_stays(monkeypatch):
    losses = iter([3.0, 1.5, 2.0, 2.5, 2.0, 1.5])
    monkeypatch.setattr(evaluation, "score", lambda *_: evaluation.Score(next(losses), None))
    options = ["eval.interval=1", "save.interval_steps=1", "save.keep=1", "eval.samples=0"]
    assert run("best", *options) == 0
    assert sorted(os.listdir("best/checkpoints")) == [f"step-{n:08d}" for n in (2, 5, 6)]
    losses = iter([3.0, 1.5, 2.0, 2.5, 2.0, 1.5])
    assert run("rare", *options, "save.interval_steps=6") == 0
    assert checkpoint("rare", 2).is_dir(), "only the evaluation asked for this one"
    state = json.loads((checkpoint("rare", 6) / "trainer_state.json").read_bytes())
    assert state["best"] == {"step": 2, "val_loss": 1.5}


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
    return Settings.from_tables(RunDir.open(Path(name)).tables).config(VOCAB)
