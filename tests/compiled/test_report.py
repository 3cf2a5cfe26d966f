"""The kernels' machine code, compiled for cards that need not be here.

Compiling takes a process without TRITON_INTERPRET, so the report runs in one of its own.
"""

import json
import os
import subprocess
import sys

import pytest
import triton

from fastbrain.kernels import report
from fastbrain.kernels.gates import Gate
from fastbrain.kernels.production import OPERATIONS, shapes


def run(cache, *arguments, **environment):
    """The report as a user starts it, from an empty cache."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "fastbrain.kernels.report", *arguments],
        env=kept | {"TRITON_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
    )


def read(cache, *arguments):
    done = run(cache, "--json", *arguments)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    # the compilers' time is that of the machine, which may be slow
    own = [line for line in found["failed"] if "compilation on" not in line]
    return own, found["families"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    cache = tmp_path_factory.mktemp("home")
    return read(
        cache,
        "--arch=sm_86",
        "--operations=causal_attention,expert_ffn",
        "--shapes=chapter,dense",
        "--dtypes=bf16",
        "--jobs=1",
    )


def test_attention_and_experts_pass_every_gate(home):
    failed, _ = home
    assert not failed


def test_the_table_has_every_kernel_of_them(home):
    _, families = home
    kernels = {row["kernel"] for row in families["sm_86"]["rows"]}
    assert kernels >= {
        "attention.fwd",
        "attention.bwd_dq",
        "attention.bwd_dkv",
        "experts.hidden",
        "experts.hidden_grad",
        "grouped_gemm.rows",
        "grouped_gemm.weights",
    }


def test_products_are_counted_and_timed(home):
    _, families = home
    for row in families["sm_86"]["rows"]:
        if row["products"]:
            found, expected = row["products"].split("/")
            assert found == expected != "0"
            # nothing is faster than the tensor cores
            assert float(row["simulated ms"]) > float(row["tensor ms"]) > 0


def test_simulated_times_are_gates(home):
    _, families = home
    names = [gate["name"] for gate in families["sm_86"]["gates"]]
    assert sum("ms" in name for name in names) == 3
    assert sum("x one expert" in name for name in names) >= 8


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    cache = tmp_path_factory.mktemp("attention")
    return read(cache, "--operations=causal_attention", "--shapes=dense", "--jobs=1")


@pytest.mark.slow
def test_attention_passes_every_gate_in_both_dtypes_on_both_cards(attention):
    failed, families = attention
    assert not failed
    assert [len(families[family]["rows"]) for family in ("sm_86", "sm_90")] == [6, 6]


@pytest.mark.slow
def test_fp32_products_stay_off_the_tensor_cores(attention):
    _, families = attention
    for family in families.values():
        fp32 = [row["products"] for row in family["rows"] if row["dtype"] == "fp32"]
        assert fp32 == ["0/0"] * 3


@pytest.mark.slow
def test_the_other_card_gets_its_own_products(attention):
    _, families = attention
    for row in families["sm_90"]["rows"]:
        if row["dtype"] == "bf16":
            (gate,) = (g for g in row["gates"] if "closed form" in g["name"])
            assert "HGMMA" in gate["found"]


def test_a_failed_gate_is_named_and_gives_status_1(monkeypatch, capsys):
    spilled = report.Report("sm_86", [], [Gate("no spills", False, "8 bytes")])
    passed = report.Report("sm_90", [], [Gate("no spills", True, "0 bytes")])
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(report, "report", lambda *_: [spilled, passed])
    assert report.main([]) == 1
    assert capsys.readouterr().err == "FAILED sm_86: no spills, found 8 bytes\n"
    monkeypatch.setattr(report, "report", lambda *_: [passed])
    assert report.main([]) == 0
    assert not capsys.readouterr().err


def test_the_interpreter_is_refused(tmp_path):
    done = run(tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def refusal(monkeypatch, capsys, *arguments):
    """What an argument error prints last."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(report, "report", lambda *_: pytest.fail("it went on"))
    with pytest.raises(SystemExit) as stopped:
        report.main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--arch=sm_75", "must be among sm_80, sm_86, sm_89, sm_90, got sm_75"),
        ("--operations=rotary,swigl", f"must be among {', '.join(OPERATIONS)}, got swigl"),
        ("--operations=linear", "got linear"),
        ("--operations=", "got "),
        ("--shapes=width 33,dense", f"must be among {', '.join(shapes())}, got width 33"),
        ("--dtypes=fp64", "must be among bf16, fp32, got fp64"),
        ("--jobs=0", "must be a whole number above 0, got 0"),
        ("--jobs=-2", "must be a whole number above 0, got -2"),
        ("--jobs=many", "must be a whole number above 0, got many"),
    ],
)
def test_an_argument_error_says_what_there_is(monkeypatch, capsys, argument, words):
    option, _, _ = argument.partition("=")
    line = refusal(monkeypatch, capsys, argument)
    assert f"argument {option}: " in line
    assert line.endswith(words)


def test_a_choice_that_matches_nothing_is_refused(monkeypatch, capsys):
    line = refusal(monkeypatch, capsys, "--operations=swiglu", "--shapes=width 64,packed")
    assert line.endswith(
        "argument --shapes: of swiglu must be among chapter, default, dense, got width 64, packed"
    )


@pytest.mark.parametrize(
    ("arguments", "families"),
    [
        ([], ["sm_86", "sm_90"]),
        (["--arch=sm_80,sm_89"], ["sm_80", "sm_89"]),
    ],
)
def test_the_cards_are_chosen(monkeypatch, arguments, families):
    asked = []

    def compiled(chosen, choice, jobs):
        asked.extend(chosen)
        return []

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(report, "report", compiled)
    assert report.main([*arguments, "--shapes=dense"]) == 0
    assert asked == families


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm_80", "sm_89"])
def test_cards_near_the_home_one_pass_their_gates(tmp_path, family):
    failed, families = read(tmp_path, f"--arch={family}", "--dtypes=bf16", "--shapes=dense,default")
    assert not failed
    for row in families[family]["rows"]:
        # times are the home card's alone
        assert "simulated ms" not in row
        products = [gate["name"] for gate in row["gates"] if "closed form" in gate["name"]]
        assert products == ["HMMA as the closed form"] * bool(row["products"])


@pytest.mark.slow
def test_every_kernel_passes_every_gate(tmp_path):
    failed, families = read(tmp_path)
    assert not failed
    assert set(families) == {"sm_86", "sm_90"}
    operations = {row["operation"] for row in families["sm_86"]["rows"]}
    assert operations == {
        "adam_step",
        "causal_attention",
        "expert_ffn",
        "grad_norm",
        "grouped_matmul",
        "linear_cross_entropy",
        "masked_cross_entropy",
        "rms_norm",
        "rotary",
        "swiglu",
    }
