"""Fine-tuning on instructions is a run like any other: it resumes to the bit, and it learns."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fixture_models import FIXTURES
from instruction_runs import base, files, pairs
from training_runs import bits, checkpoint, entered, numbers

from fastbrain import InvalidConfig, Sampler, TransformerLm, cli
from fastbrain.tokens.chat_template import ChatTemplate
from fastbrain.tokens.packed_file import PackedFile
from fastbrain.training import metrics
from fastbrain.training.pretrained import open_pretrained

SETTINGS = (
    "data.seq_len=48",
    "train.global_batch_size=3",
    "train.micro_batch_size=1",
    "train.learning_rate=1e-2",
    "save.interval_steps=4",
    "eval.interval=4",
    "eval.samples=1",
)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("sft")) as folder:
        base(folder / "dense")
        base(folder / "moe", moe=True)
        pairs(folder / "pairs.jsonl")
        yield folder


def sft(name: str, model: str, *more: str) -> int:
    return cli.main(["sft", model, "pairs.jsonl", "--run", name, *SETTINGS, *more])


def losses(name: str) -> list[float]:
    rows = metrics.read(Path(name, "metrics.jsonl"))
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("model", "more"), [("dense", []), ("moe", []), ("dense", ["--lora-rank=4"])]
)
def test_a_resumed_run_over_the_edge_of_an_epoch_has_the_same_bits(model, more):
    name = f"{model}{len(more)}"
    again = f"{name}-resumed"
    assert sft(name, model, "train.max_steps=8", "train.global_batch_size=5", *more) == 0
    rows = PackedFile.open(Path(name, "data", "train.packed"), 48, 42).rows()
    epoch = rows - -(-rows // 20)
    # an epoch ends between the checkpoints, in the middle of a step
    assert 4 * 5 < epoch < 8 * 5
    assert epoch % 5
    shutil.copytree(name, again)
    shutil.rmtree(checkpoint(again, 8))
    assert cli.main(["resume", again]) == 0
    assert bits(again, 8) == bits(name, 8)
    assert numbers(again) == numbers(name)


def test_epochs_are_the_length_and_the_loss_falls(capsys):
    assert sft("epochs", "dense", "--epochs=3", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    rows = PackedFile.open(Path("epochs/data/train.packed"), 48, 42).rows()
    epoch = rows - -(-rows // 20)
    assert summary["step"] == summary["steps"] == -(-3 * epoch // 3)
    found = losses("epochs")
    assert found[-1] < found[0] - 1
    # another length is the user's to ask for
    assert cli.main(["resume", "epochs", "train.epochs=4"]) == 2
    assert "--override train.epochs=4" in capsys.readouterr().err
    assert cli.main(["resume", "epochs", "--override", "train.epochs=4"]) == 0
    assert len(losses("epochs")) == -(-4 * epoch // 3)


def test_the_split_of_a_step_changes_neither_rows_nor_the_loss():
    names = ("split1", "split3")
    for name, micro in zip(names, (1, 3), strict=True):
        assert sft(name, "dense", "train.max_steps=3", f"train.micro_batch_size={micro}") == 0
    for one, other in zip(*map(losses, names), strict=True):
        assert abs(one - other) <= 1e-6 * one


def test_a_micro_batch_counts_in_the_routing_loss_by_the_tokens_that_it_routes():
    assert sft("routed", "moe", "train.max_steps=1") == 0
    [row] = [row for row in metrics.read(Path("routed/metrics.jsonl")) if "aux_loss" in row]
    model = TransformerLm.from_pretrained("moe")
    with PackedFile.open("routed/data/train.packed", 48, 42, (0, 24)) as packed:
        batches = [packed.batch([index]) for index in packed.indices(0, 3)]
    valid = [batch.valid_tokens() for batch in batches]
    assert len(set(valid)) > 1
    parts = [float(model.evaluate(batch).auxiliary_loss) for batch in batches]
    expected = sum(n * part for n, part in zip(valid, parts, strict=True)) / sum(valid)
    assert row["aux_loss"] == pytest.approx(expected, rel=1e-6)


def test_what_was_learned_is_said_and_ended():
    quiet = ("save.interval_steps=1000", "eval.interval=1000", "train.learning_rate=2e-2")
    assert sft("learned", "dense", "--epochs=10", "--validation=pairs.jsonl", *quiet) == 0
    found = open_pretrained("learned")
    chat = ChatTemplate(found.files)
    prompt = chat.encode([{"role": "user", "content": "Say plum twice."}], True).ids
    ids = found.model.generate(prompt, 20, Sampler.greedy(), stop=found.files.ends)
    assert found.files.tokenizer.decode(ids) == "plum plum."
    assert ids[-1] == found.files.tokenizer.token_to_id("<|im_end|>")
    # a sample answers a held-out request, whole, and stops where it ends
    [sample] = Path("learned", "samples").iterdir()
    assert re.fullmatch(
        r"\[<\|im_start\|>user\nSay (\w+) twice\.<\|im_end\|>\n<\|im_start\|>assistant\n\]"
        r"[^<]*<\|im_end\|>\n",
        sample.read_text(),
    )


def test_adapters_leave_the_base_as_it_was_and_merge_into_it():
    assert sft("adapted", "dense", "--lora-rank=4", "--lora-alpha=8", "train.max_steps=8") == 0
    before = dict(TransformerLm.from_pretrained("dense").weights())
    found = open_pretrained("adapted").model
    assert found.config.lora.rank == 4
    after = dict(found.weights())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(bool(t.any()) for name, t in found.adapters())
    moments = (checkpoint("adapted", 8) / "optimizer.safetensors").read_bytes()
    assert b"lora_A.weight.moment1" in moments
    assert b"q_proj.weight.moment1" not in moments
    assert losses("adapted")[-1] < losses("adapted")[0]
    # another program must not take the base for the whole
    config = json.loads((checkpoint("adapted", 8) / "config.json").read_text())
    assert config["model_type"] == "fastbrain_lora"
    ids = torch.arange(20)[None]
    expected = found.module(ids).detach()
    found.merge_lora()
    found.save_pretrained("merged", files())
    merged = TransformerLm.from_pretrained("merged").module(ids).detach()
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_adapters_are_trained_further_from_a_run_that_has_some():
    assert sft("twice", "adapted", "--lora-rank=2", "train.max_steps=2") == 0
    merged = open_pretrained("adapted").model
    merged.merge_lora()
    after = dict(open_pretrained("twice").model.weights())
    assert all(torch.equal(after[name], tensor) for name, tensor in merged.weights())


def test_a_run_without_a_checkpoint_yet_begins_with_the_same_model_again(home, capsys):
    assert sft("whole", "dense", "train.max_steps=4", "--lora-rank=4") == 0
    shutil.copytree("whole", "early")
    shutil.rmtree(checkpoint("early", 4))
    assert cli.main(["resume", "early"]) == 0
    assert bits("early", 4) == bits("whole", 4)
    # but not with another one that has taken its place
    shutil.rmtree(checkpoint("early", 4))
    shutil.move("dense", "kept")
    shutil.copytree("moe", "dense")
    assert cli.main(["resume", "early"]) == 2
    assert "is not the model that this run began with" in capsys.readouterr().err
    shutil.rmtree("dense")
    shutil.move("kept", "dense")


def test_the_same_command_goes_on_with_the_run(capsys):
    assert sft("again", "dense", "train.max_steps=4") == 0
    assert sft("again", "dense", "train.max_steps=4") == 2
    assert "add --resume auto" in capsys.readouterr().err.replace("adding", "add")
    assert sft("again", "dense", "train.max_steps=4", "--resume=auto") == 0
    assert sft("again", "dense", "train.max_steps=4", "--resume=auto", "--lora-rank=2") == 2
    assert "model.lora was None and is now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.d_model=64"], "model.d_model is 64, and the model in train.init has 32"),
        (["data.seq_len=65"], "model.max_seq_len must be at least data.seq_len, which is 65"),
        (["--lora-rank=0"], "lora.rank must be at least 1, got 0"),
        (["--lora-alpha=2"], "--lora-alpha is of adapters: give --lora-rank as well"),
        (["--template=none.jinja"], "data.template: there is no file or folder"),
        (["--template=moe/model.safetensors"], "model.safetensors is not UTF-8"),
        (["--template=moe"], "moe: it is not a plain file"),
        (["--epochs=2", "train.max_steps=3"], "has train.max_steps and train.epochs"),
        (["data.seq_len=10"], "pairs.jsonl, line 1"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(more, message, capsys):
    assert sft("refused", "dense", *more) == 2
    assert message in capsys.readouterr().err
    assert not Path("refused", "config.toml").exists()


def test_a_longer_context_is_the_runs_to_choose():
    assert (
        sft("longer", "dense", "train.max_steps=1", "model.max_seq_len=96", "data.seq_len=80") == 0
    )
    assert open_pretrained("longer").model.config.max_seq_len == 96


def test_bad_examples_stop_the_run_or_are_counted(capsys):
    good = Path("pairs.jsonl").read_text()
    Path("mixed.jsonl").write_text('{"prompt": "Say red twice.", "response": " "}\n' + good)
    command = ["sft", "dense", "mixed.jsonl", "--run", "mixed", *SETTINGS, "train.max_steps=1"]
    assert cli.main(command) == 2
    assert "mixed.jsonl, line 1: " in capsys.readouterr().err
    assert cli.main([*command, "--skip-bad"]) == 0
    assert "1 " in capsys.readouterr().out


def test_training_on_text_may_begin_from_a_model_too():
    Path("text.txt").write_text("Say red twice. red red.\n" * 40)
    Path("further.toml").write_text(
        '[data]\ntrain = "text.txt"\nseq_len = 16\n[train]\nmax_steps = 2\ninit = "dense"\n'
        "global_batch_size = 2\n"
    )
    assert cli.main(["train", "further.toml", "--run", "further"]) == 0
    found, start = open_pretrained("further"), open_pretrained("dense")
    assert found.files.tokenizer.to_str() == start.files.tokenizer.to_str()
    assert found.model.config == start.model.config
    before, after = start.model.weights(), found.model.weights()
    changes = [(a - b).abs().max() for (_, a), (_, b) in zip(after, before, strict=True)]
    assert 0 < max(changes) < 1e-2


def test_the_tokenizer_of_a_run_is_shown_with_its_template(capsys):
    assert sft("shown", "dense", "train.max_steps=1") == 0
    capsys.readouterr()
    assert cli.main(["tokenizer", "show", "shown", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chat_template"] is True
    assert found["ends"] == list(open_pretrained("shown").files.ends)


def test_a_run_that_was_made_shorter_than_it_is_is_refused(capsys):
    assert sft("long", "dense", "train.max_steps=8") == 0
    assert cli.main(["resume", "long", "--override", "train.max_steps=4"]) == 2
    assert "the run would have 4 steps, and 8 are done" in capsys.readouterr().err
    # fewer rows make fewer steps of as many epochs
    assert sft("rows", "dense", "--epochs=1") == 0
    steps = len(losses("rows"))
    Path("few.jsonl").write_text("".join(Path("pairs.jsonl").read_text().splitlines(True)[:12]))
    few = ["--override", "data.train=few.jsonl"]
    record = Path("rows/data/corpus.json").read_bytes()
    assert cli.main(["resume", "rows", *few]) == 2
    assert f"and {steps} are done" in capsys.readouterr().err
    # what was refused has changed nothing
    assert Path("rows/data/corpus.json").read_bytes() == record
    assert cli.main(["resume", "rows"]) == 0
    assert cli.main(["resume", "rows", *few, "--override", "train.epochs=9"]) == 0
    said = capsys.readouterr().out
    assert f"the run had {steps} steps and now has {len(losses('rows'))}" in said
    assert "The learning rate at step" in said
    assert [path.name for path in Path("rows/data").glob("train*")] == ["train-1.packed"]


def test_what_a_model_lacks_is_told_before_anything_is_made(capsys):
    model = TransformerLm.from_pretrained("dense")
    Path("bare").mkdir()
    model.save_bin("bare/model.rbw")
    assert sft("bare-run", "bare/model.rbw") == 2
    assert "weights bare/model.rbw has no tokenizer beside it" in capsys.readouterr().err.replace(
        str(Path.cwd()) + "/", ""
    )
    more = ["--tokenizer=dense/tokenizer.json", "train.max_steps=1"]
    assert sft("bare-run", "bare/model.rbw", *more) == 0
    with torch.no_grad():
        model.module.norm.weight[3] = float("nan")
    model.save_bin("bare/nan.rbw")
    assert sft("nan", "bare/nan.rbw", *more) == 2
    assert "model.norm.weight holds values that are not finite numbers" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(InvalidConfig, match=r"the tokenizer has 300 tokens, and weights .* of 61"):
        open_pretrained(FIXTURES / "dense" / "trained.rbw", "dense")
