"""The words of `python -m fastbrain.sweep_arch`: what they mean, and what is refused of them."""

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.sweep_arch import command
from fastbrain.sweep_arch.arguments import add_flags, add_shape
from fastbrain.sweep_arch.request import Request, request_of
from fastbrain.sweep_arch.values import tokens

CHAPTER = "32000 1024 20 8 512 1 8 2"


def asked(words: str) -> Request:
    parser = argparse.ArgumentParser()
    add_shape(parser)
    add_flags(parser)
    return request_of(parser.parse_intermixed_args(words.split()))


def test_the_chapters_command_has_its_counts():
    counts = asked(CHAPTER).config.parameter_counts()
    assert counts == (453_043_200, 219_472_896)
    assert str(counts) == "453.0M total / 219.5M active (2.06x)"


def test_flags_reach_the_chapters_own_example():
    request = asked(f"{CHAPTER} --moe-d-ff 512 --moe-start 5 --max-seq-len 1024")
    assert request.config.parameter_counts() == (340_952_064, 199_394_304)
    assert request.config == TransformerConfig(
        32_000, 1024, 20, 16, 4, 64, 2816, 512, 8, 2, tuple(range(5, 20)), max_seq_len=1024
    )


def test_nothing_said_is_the_reference_systems_default():
    request = asked("")
    assert request.config == TransformerConfig(max_seq_len=512)
    assert (request.batch, request.seq, request.steps, request.tokens) == (16, 512, 5, 50 * 10**9)
    assert (request.device, request.mixed_precision, request.budget_mib) == (None, None, 0)
    assert request.label == "v32000 d512 L8 16x512 moe8x2"
    assert not request.notes


@pytest.mark.parametrize("d_model", [64, 128, 192, 256, 320, 512, 768, 1024, 2048])
def test_widths_follow_from_d_model(d_model):
    config = asked(f"1000 {d_model} 4 2 64 --kv-heads 1").config
    assert config.n_heads * config.head_dim == d_model
    assert config.head_dim == 64
    assert config.d_ff == d_model * 11 // 4
    assert config.moe_d_ff == d_model * 11 // 16
    assert config.moe_layers == (2, 3)


@pytest.mark.parametrize(("d_model", "kv_heads"), [(64, 1), (192, 1), (256, 1), (512, 2), (768, 3)])
def test_a_quarter_of_the_heads_are_key_value_heads(d_model, kv_heads):
    assert asked(f"1000 {d_model}").config.n_kv_heads == kv_heads


@pytest.mark.parametrize(("seq", "positions"), [(64, 256), (256, 256), (257, 257), (4096, 4096)])
def test_positions_reach_to_the_sequence(seq, positions):
    assert asked(f"1000 64 2 2 {seq}").config.max_seq_len == positions


def test_dense_has_no_experts_whatever_their_number():
    request = asked("1000 512 8 16 512 0 8 2")
    assert request.config.moe_layers == ()
    assert request.label == "v1000 d512 L8 16x512 dense"


def test_flags_stand_anywhere_among_the_positionals():
    words = "1000 --d-ff 7 512 --json 8 16 --device cpu 512 --untied 1"
    assert asked(words) == asked("1000 512 8 16 512 1 --untied --device cpu --d-ff 7 --json")


FLAGS = {
    "vocab_size": ("9 512 8 16 512", 9),
    "d_model": ("32000 640 8 16 512 --kv-heads 2", 640),
    "n_layers": ("32000 512 3 16 512", 3),
    "n_heads": ("--heads 6 --kv-heads 3", 6),
    "n_kv_heads": ("--kv-heads 4", 4),
    "head_dim": ("--head-dim 32", 32),
    "d_ff": ("--d-ff 10", 10),
    "moe_d_ff": ("--moe-d-ff 11", 11),
    "num_experts": ("32000 512 8 16 512 1 5", 5),
    "experts_per_token": ("32000 512 8 16 512 1 8 3", 3),
    "moe_layers": ("--moe-layers 1,5,3", (1, 3, 5)),
    "shared_expert": ("--no-shared-expert", False),
    "max_seq_len": ("--max-seq-len 600", 600),
    "rope_base": ("--rope-base 5e5", 5e5),
    "rope_scaling": ("--rope-scaling llama3:8:1:4:8192", Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    "rmsnorm_eps": ("--rmsnorm-eps 1e-5", 1e-5),
    "tie_embeddings": ("--untied", False),
    "aux_loss_weight": ("--aux-loss-weight 0", 0.0),
    "router_z_loss_weight": ("--router-z-loss-weight 0", 0.0),
}


# adapters are no part of a shape
@pytest.mark.parametrize("field", [f.name for f in fields(TransformerConfig) if f.name != "lora"])
def test_every_field_of_the_shape_can_be_said(field):
    words, value = FLAGS[field]
    assert getattr(asked(words).config, field) == value
    assert getattr(asked("").config, field) != value


def test_linear_scaling_can_be_said():
    assert asked("--rope-scaling linear:4").config.rope_scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1000 100", "d_model is 100, .* multiple of the head width of 64.*pass --heads.* 128"),
        ("1000 1408", r"5 key-value heads \(a quarter of the heads\) do not divide the 22.* as 2"),
        ("1000 512 --kv-heads 3", r"3 key-value heads \(as asked for\) do not divide the 8 heads"),
        ("1000 64 3 2 1", "seq must be at least 2.*got 1"),
        ("1000 64 3 2 32 --max-seq-len 31", "--max-seq-len is 31, shorter than seq, which is 32"),
        ("1000 64 3 2 32 --moe-start 3", "--moe-start is 3, but layers is 3"),
        ("1000 64 3 2 32 --moe-layers 0,3", "moe_layers names layer 3"),
        ("1000 64 3 2 32 1 8 9", "experts_per_token must be from 1 to num_experts"),
        ("1000 64 --head-dim 32 --heads 2 --rope-base 0", "rope_base must be above 0"),
        ("1000 96 --head-dim 3 --kv-heads 1", "head_dim must be even"),
        ("1 64 3 2 32 0 8 2 --moe-start 0", "--moe-start says something of experts"),
        ("1 64 3 2 32 0 8 2 --moe-layers 0", "--moe-layers says something of experts"),
        ("1 64 3 2 32 0 8 2 --moe-d-ff 8", "--moe-d-ff says something of experts"),
        ("1 64 3 2 32 0 8 2 --no-shared-expert", "--no-shared-expert says something of experts"),
        ("1 64 3 2 32 0 8 2 --aux-loss-weight 1", "--aux-loss-weight says something of experts"),
        ("1 64 3 2 32 0 --router-z-loss-weight 1", "--router-z-loss-weight says something"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_way_out(words, message):
    with pytest.raises(InvalidConfig, match=message):
        asked(words)


def test_experts_that_have_no_layer_are_said_not_refused():
    request = asked("1000 64 2 2 32")
    assert request.config.moe_layers == ()
    assert "pass --moe-start 0" in request.notes[0]
    assert asked("1000 64 2 2 32 --moe-start 0").notes == ()
    assert asked("1000 64 2 2 32 0").notes == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("x", "argument vocab: must be a whole number from 1 to 2147483647, got 'x'"),
        ("1000 64.5", "argument d_model: must be a whole number"),
        ("1000 64 10001", "argument layers: must be a whole number from 1 to 10000"),
        ("1000 64 3 0", "argument batch: must be a whole number from 1"),
        ("1000 64 3 2 -32", "argument seq: must be a whole number from 1"),
        ("1000 64 3 2 32 2", "argument moe: must be a whole number from 0 to 1, got '2'"),
        ("1000 64 3 2 32 1 0", "argument experts: must be a whole number from 1"),
        ("1000 64 3 2 32 1 8 two", "argument top_k: must be a whole number from 1"),
        ("1 64 3 2 32 1 8 2 9", "unrecognized arguments: 9"),
        ("--heads 0", "argument --heads: must be a whole number from 1"),
        ("--steps 4", "argument --steps: must be a whole number from 5"),
        ("--budget-mib -1", "argument --budget-mib: must be a whole number from 0"),
        ("--device tpu", "argument --device: must be cpu, cuda or cuda:N"),
        ("--device cuda:", "argument --device: must be cpu, cuda or cuda:N"),
        ("--tokens lots", "argument --tokens: must be a number of tokens"),
        ("--moe-layers 1,,2", "argument --moe-layers: must be a whole number"),
        ("--moe-layers 1 --moe-start 1", "not allowed with argument"),
        ("--rope-scaling linear", "argument --rope-scaling: must be linear:FACTOR or llama3:"),
        ("--rope-scaling linear:x", "argument --rope-scaling: must be linear:FACTOR"),
        ("--rope-scaling linear:-1", "argument --rope-scaling: factor must be above 0"),
        ("--rope-base ten", "argument --rope-base: must be a number, got 'ten'"),
        ("--kv 2", "unrecognized arguments: --kv"),
    ],
)
def test_a_word_that_is_no_value_is_refused_by_name(words, message, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(words.split(), lambda *_: pytest.fail("it was measured"))
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("50e9", 50 * 10**9),
        ("50B", 50 * 10**9),
        ("3.5b", 3_500_000_000),
        ("500M", 500 * 10**6),
        ("2T", 2 * 10**12),
        ("10k", 10_000),
        ("1", 1),
        ("3_500_000", 3_500_000),
        ("1.5e3k", 1_500_000),
    ],
)
def test_tokens_are_read_as_people_write_them(text, count):
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e400", "B", "5G", "1.2.3", "0.2"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number of tokens"):
        tokens(text)


def test_help_and_refusals_come_without_torch():
    script = """
import sys
from fastbrain.sweep_arch.command import main
for arguments in (["--help"], ["x"], ["1000", "100"], ["--table", "/nowhere/shapes"], ["--table"]):
    try:
        print("exit", main(arguments))
    except SystemExit as exit:
        print("exit", exit.code)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit")]
    assert codes == ["exit 0", "exit 2", "exit 2", "exit 2", "exit 2"]
    assert f"  python -m fastbrain.sweep_arch {CHAPTER}\n" in done.stdout
