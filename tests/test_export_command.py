"""`fastbrain export` and `fastbrain import`, as they are typed."""

import importlib.util
import json

import pytest
import torch
from fixture_models import FIXTURES, assert_same_bits
from hf_directories import MODELS, exported, with_settings
from made_runs import command
from models import DENSE, MOE, batch, model
from texts import small_tokenizer
from training_runs import checkpoint, entered, run

from fastbrain import Precision, TransformerLm
from fastbrain.commands import export, import_model
from fastbrain.commands.export_check import Checked, chooses
from fastbrain.config import LoraConfig
from fastbrain.formats import hf_layout
from fastbrain.formats.hf_import import Directory
from fastbrain.tokens.tokenizer_files import TokenizerFiles

has_transformers = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not has_transformers, reason="transformers is absent")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two checkpoints, of a model with experts."""
    with entered(tmp_path_factory.mktemp("trained")) as folder:
        assert run("first", "model.moe_layers=[1]") == 0
        yield folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """An empty folder to write into, and a run beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first").symlink_to(trained / "first")
    return tmp_path


@pytest.fixture
def weights(tmp_path):
    """A weights file."""
    made = model(MOE)
    made.save_bin(tmp_path / "model.rbw")
    return made


def test_a_run_becomes_a_directory_of_its_newest_checkpoint(here, capsys):
    assert command(export, "hf", "first", "out", "--no-check") == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "read      checkpoint first/checkpoints/step-00000006"
    assert "3 files" in said
    assert "ernie4_5_moe, float32" in said
    found = TransformerLm.from_pretrained("out")
    expected = TransformerLm.from_pretrained(checkpoint("first", 6))
    assert_same_bits(found.weights(), expected.weights())
    assert command(export, "hf", "first", "older", "--step", 3, "--no-check") == 0
    older = TransformerLm.from_pretrained("older")
    expected = TransformerLm.from_pretrained(checkpoint("first", 3))
    assert_same_bits(older.weights(), expected.weights())


@needs_transformers
@pytest.mark.parametrize("options", [(), ("--arch", "qwen2_moe", "--dtype", "bfloat16")])
def test_what_was_written_is_compared_in_transformers(here, capsys, options):
    assert command(export, "hf", "first", "out", "--json", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["difference"] < 1e-5
    assert found["check"]["greedy_equal"]
    assert found["check"]["agrees"]
    assert (found["check"]["loss_change"] is None) == (not options)
    assert found["arch"] == ("qwen2_moe" if options else "ernie4_5_moe")
    assert found["bytes"] == sum(path.stat().st_size for path in (here / "out").iterdir())


@needs_transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_is_told_and_gives_another_exit_code(here, capsys, monkeypatch, dtype):
    monkeypatch.setattr(hf_layout, "interleaved", lambda matrix, head_dim: matrix)
    assert command(export, "hf", "first", "out", "--dtype", dtype) == 1
    assert "do not use it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("difference", "greedy_equal", "loss_change", "agrees"),
    [
        (1e-4, True, None, True),
        (1.1e-4, True, None, False),
        (1e-7, False, None, False),
        (1e-7, True, -0.1, True),
        (1e-7, True, -0.11, False),
        (1e-7, True, 0.11, False),
    ],
)
def test_what_is_too_much(difference, greedy_equal, loss_change, agrees):
    found = Checked(difference, greedy_equal, loss_change, "5.0")
    assert found.agrees == agrees
    assert ("do not use it" in found.words()) == (not agrees)


@pytest.mark.parametrize(
    ("ahead", "same"), [(0.0, True), (1e-4, True), (1.1e-3, False), (1.0, False)]
)
def test_a_tie_that_arithmetic_decides_is_no_other_choice(ahead, same):
    # what comes before the tokens wanted does not count, but it is the scale
    logits = torch.tensor([[10.0, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    logits[2, 1] = 1 + ahead
    assert chooses(logits, [1, 2]) == same
    assert chooses(logits, [])


def test_without_transformers_nothing_is_compared_unless_asked(here, capsys, monkeypatch):
    monkeypatch.setattr(export, "_has_transformers", lambda: False)
    assert command(export, "hf", "first", "out", "--check") == 2
    assert "pip install fastbrain[hf]" in capsys.readouterr().err
    assert not (here / "out").exists()
    assert command(export, "hf", "first", "out") == 0
    assert "not checked: transformers is not installed" in capsys.readouterr().out


def test_a_weights_file_takes_the_optimizer_along(here, capsys):
    assert command(export, "rbw", "first", "out.rbw", "--with-optimizer") == 0
    assert "with the optimizer's state, 6 updates" in capsys.readouterr().out
    found = TransformerLm.load_bin("out.rbw")
    found.load_optimizer_state("out.opt")
    assert found.optimizer_step() == 6
    assert found.optimizer.betas == (0.9, 0.95)
    assert found.optimizer.weight_decay == 0.1
    lines = (here / "first" / "metrics.jsonl").read_text().splitlines()
    rates = [row["learning_rate"] for row in map(json.loads, lines) if "learning_rate" in row]
    assert found.learning_rate() == pytest.approx(rates[-1], rel=1e-6)
    moments = {name: first for name, first, _ in found.moments()}
    assert all(moment.any() for moment in moments.values())


@pytest.mark.parametrize("stopped", ["save_bin", "save_optimizer_state"])
def test_stopped_anywhere_no_state_is_beside_weights_of_another_step(here, monkeypatch, stopped):
    export_of = ("rbw", "first", "out.rbw", "--with-optimizer", "--force")
    assert command(export, *export_of, "--step", 3) == 0

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransformerLm, stopped, stop)
        assert command(export, *export_of) != 0
    assert not (here / "out.opt").exists()
    step = {"save_bin": 3, "save_optimizer_state": 6}[stopped]
    assert TransformerLm.load_bin("out.rbw").optimizer_step() == step
    assert command(export, *export_of) == 0
    found = TransformerLm.load_bin("out.rbw")
    found.load_optimizer_state("out.opt")
    assert found.optimizer_step() == 6


def test_a_weights_file_alone_begins_anew(here, capsys):
    assert command(export, "rbw", "first", "out.rbw", "--precision", "q8") == 0
    assert not (here / "out.opt").exists()
    found = TransformerLm.load_bin("out.rbw")
    assert found.optimizer_step() == 0
    expected = TransformerLm.from_pretrained(checkpoint("first", 6))
    expected.save_bin("expected.rbw", Precision.Q8)
    assert_same_bits(found.weights(), TransformerLm.load_bin("expected.rbw").weights())


def test_a_gguf_is_written_and_imported(here, capsys):
    pytest.importorskip("gguf")
    assert command(export, "gguf", "first", "out.gguf", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["files"]) == ("gguf", ["out.gguf"])
    assert command(import_model, "out.gguf", "back") == 0
    expected = TransformerLm.from_pretrained(checkpoint("first", 6))
    assert_same_bits(TransformerLm.from_pretrained("back").weights(), expected.weights())


def test_adapters_are_merged_and_it_is_said(tmp_path, capsys):
    made = model(DENSE)
    made.add_lora(LoraConfig(rank=2))
    for name, view in made.weights():
        if name.endswith("lora_B.weight"):
            view.normal_()
    made.save_bin(tmp_path / "model.rbw")
    assert command(export, "hf", tmp_path / "model.rbw", tmp_path / "out", "--no-check") == 0
    assert "its adapters merged" in capsys.readouterr().out
    made.merge_lora()
    found = TransformerLm.from_pretrained(tmp_path / "out")
    assert_same_bits(found.weights(), made.weights())


def test_moments_of_adapters_do_not_fit_merged_weights(tmp_path, capsys):
    made = model(DENSE)
    made.add_lora(LoraConfig(rank=2))
    made.save_bin(tmp_path / "model.rbw")
    target = tmp_path / "out.rbw"
    assert command(export, "rbw", tmp_path / "model.rbw", target, "--with-optimizer") == 2
    assert "merged into the weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf", "first", "there"), "there exists already; add --force"),
        (("hf", "first", "there", "--force"), "is not replaced, because it has"),
        (("hf", "first", "out", "--arch", "llama"), "has experts; export it as"),
        (("hf", "first", "a/b"), "there is no directory"),
        (("hf", "gone", "out"), "cannot read gone"),
        (("hf", "first", "out", "--step", "4"), "no checkpoint of step 4"),
        (("rbw", "first", "out"), "out must end in .rbw"),
        (("gguf", "first", "out.rbw"), "out.rbw must end in .gguf"),
        (("rbw", "there/model.rbw", "out.rbw", "--with-optimizer"), "needs a run or a checkpoint"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(here, capsys, arguments, message):
    (here / "there").mkdir()
    model(DENSE).save_bin(here / "there" / "model.rbw")
    before = sorted(here.rglob("*"))
    assert command(export, *arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("fastbrain: ")
    assert message in said.err
    assert not said.out
    assert sorted(here.rglob("*")) == before


def test_the_optimizer_state_of_another_export_is_neither_replaced_nor_hidden(here, capsys):
    (here / "out.opt").write_bytes(b"of another")
    assert command(export, "rbw", "first", "out.rbw", "--with-optimizer") == 2
    assert "out.opt exists already" in capsys.readouterr().err
    assert command(export, "rbw", "first", "out.rbw") == 0
    assert "out.opt was left as it is" in capsys.readouterr().err
    assert (here / "out.opt").read_bytes() == b"of another"


def test_a_directory_of_another_program_is_imported_with_its_tokenizer(tmp_path):
    config = type(DENSE)(**vars(DENSE) | {"vocab_size": 600})
    theirs = tmp_path / "theirs"
    words = TokenizerFiles(
        small_tokenizer(), "<|endoftext|>", "<|pad|>", chat_template="{{ messages }}"
    )
    made = exported(theirs, config, files=words)
    with_settings(theirs, {})
    assert command(import_model, theirs, tmp_path / "ours") == 0
    found = Directory.open(tmp_path / "ours")
    assert found.config.d_model == config.d_model
    assert_same_bits(TransformerLm.from_pretrained(tmp_path / "ours").weights(), made.weights())
    said = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert said["chat_template"] == "{{ messages }}"
    assert (tmp_path / "ours" / "tokenizer.json").exists()


def test_a_weights_file_becomes_a_directory_that_holds_any_model(tmp_path, capsys):
    made = model(MODELS["moe-scattered"])
    made.save_bin(tmp_path / "model.rbw")
    made.save_optimizer_state(tmp_path / "model.opt")
    assert command(import_model, tmp_path / "model.rbw", tmp_path / "out", "--json") == 0
    said = capsys.readouterr()
    assert "model.opt was left out" in said.err
    assert json.loads(said.out)["parameters"] == made.parameter_counts().total
    found = TransformerLm.from_pretrained(tmp_path / "out")
    assert found.config == made.config
    assert_same_bits(found.weights(), made.weights())


def test_the_reference_directory_becomes_the_reference_weights_file(tmp_path, capsys):
    assert command(import_model, FIXTURES / "dense" / "hf", tmp_path / "out.rbw") == 0
    found = TransformerLm.load_bin(tmp_path / "out.rbw")
    expected = TransformerLm.load_bin(FIXTURES / "dense" / "trained.rbw")
    assert_same_bits(found.weights(), expected.weights())
    assert found.optimizer_step() == 0


def test_what_cannot_be_imported_is_refused_in_a_line(tmp_path, weights, capsys):
    source = tmp_path / "model.rbw"
    assert command(import_model, source, source) == 2
    assert "exists already; add --force" in capsys.readouterr().err
    exported(tmp_path / "theirs", MOE)
    with_settings(tmp_path / "theirs", {"model_type": "mixtral"})
    assert command(import_model, tmp_path / "theirs", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith("fastbrain: ")
    assert "model_type is 'mixtral'" in said
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_replaced_when_asked(tmp_path, weights, capsys):
    source, out = tmp_path / "model.rbw", tmp_path / "out"
    exported(out, DENSE)
    assert command(import_model, source, out, "--force") == 0
    assert Directory.open(out).config == MOE
    with torch.no_grad():
        weights.module.embedding.weight.zero_()
    weights.save_bin(source)
    assert command(import_model, source, tmp_path / "out.rbw") == 0
    assert command(import_model, source, tmp_path / "out.rbw", "--force") == 0


def test_an_imported_weights_file_begins_at_step_0(tmp_path, weights):
    weights.train_step_batch(batch(2, 8))
    weights.save_bin(tmp_path / "trained.rbw")
    assert TransformerLm.load_bin(tmp_path / "trained.rbw").optimizer_step() == 1
    assert command(import_model, tmp_path / "trained.rbw", tmp_path / "out.rbw") == 0
    found = TransformerLm.load_bin(tmp_path / "out.rbw")
    assert found.optimizer_step() == 0
    assert_same_bits(found.weights(), weights.weights())
