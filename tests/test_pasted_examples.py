"""What the help of the verbs between programs shows works when it is pasted, in order."""

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from instruction_runs import pairs
from texts import TOPICS
from training_runs import entered

from fastbrain import cli

TOML = """
[model]
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 16
d_ff = 64
moe_d_ff = 32
num_experts = 3
moe_layers = [1]
max_seq_len = 512

[data]
train = "corpus.txt"
tokenizer = "small"
seq_len = 64

[train]
max_steps = 1
global_batch_size = 2
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A folder with what the examples take for granted: a run, a model, and answers."""
    with entered(tmp_path_factory.mktemp("pasted")) as folder:
        Path("corpus.txt").write_text("\n".join(TOPICS[:4]))
        Path("first.toml").write_text(TOML)
        pairs(Path("answers.jsonl"), 24)
        assert cli.main(["tokenizer", "train", "corpus.txt", "small/", "--vocab-size", "400"]) == 0
        assert cli.main(["train", "first.toml", "--run", "runs/first"]) == 0
        Path("downloaded").mkdir()
        model = ["export", "hf", "runs/first", "downloaded/SmolLM2-135M", "--no-check"]
        assert cli.main(model) == 0
        yield folder


def examples(capsys, *verb: str) -> list[list[str]]:
    with pytest.raises(SystemExit):
        cli.main([*verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("  fastbrain ")]


@pytest.mark.parametrize(
    "verb",
    [["import"], ["export"], ["export", "hf"], ["export", "rbw"], ["export", "gguf"], ["sft"]],
    ids=" ".join,
)
def test_examples_work_when_pasted(capsys, verb):
    shown = examples(capsys, *verb)
    assert shown
    for words in shown:
        if "gguf" in words and not find_spec("gguf"):
            continue
        # short enough for a test, and without a person at the keyboard
        more = {"sft": ["train.max_steps=1"], "generate": ["-n", "2"]}.get(words[0], [])
        if words[0] != "chat":
            assert cli.main([*words, *more]) == 0, (words, capsys.readouterr().err)
    for made in ("exported", "imported"):
        shutil.rmtree(made, ignore_errors=True)
    for made in Path().glob("model.*"):
        made.unlink()
