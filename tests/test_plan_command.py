"""`fastbrain plan`: what it takes from words and files, and that it prints what the plan says."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from fastbrain.commands import plan as command
from fastbrain.commands import plan_asked
from fastbrain.config import TransformerConfig
from fastbrain.plan import CARDS, Card, plan, remedies
from fastbrain.training.command import parse

MIB = 2**20
CHAPTER = TransformerConfig(
    32_000, 1024, 20, 16, 4, 64, 2816, 512, 8, 2, tuple(range(5, 20)), max_seq_len=1024
)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parse(parser, words))


@pytest.fixture
def text(capsys):
    def said(*words: str) -> str:
        assert run(*words) == 0
        return capsys.readouterr().out

    return said


@pytest.fixture
def plans(text):
    def found(*words: str) -> list[dict[str, Any]]:
        return json.loads(text(*words, "--json"))["plans"]

    return found


@pytest.fixture
def file(tmp_path):
    def written(*lines: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text("\n".join(lines))
        return str(path)

    return written


def line(page: str, start: str) -> list[str]:
    """The words after the start of the only line that has it."""
    (found,) = [each for each in page.splitlines() if each.strip().startswith(start)]
    return found.strip().removeprefix(start).split()


def test_nothing_said_is_the_builders_default_model(plans):
    (found,) = plans()
    made = plan(TransformerConfig(), "rtx3060", 8, 1024)
    assert found["parameters"] == {"total": made.counts.total, "active": made.counts.active}
    assert (found["batch"], found["seq"], found["accumulate"]) == (8, 1024, 1)
    assert (found["card"]["key"], found["mixed_precision"]) == ("rtx3060", True)
    assert found["step_ms"] == made.step_ms
    assert found["days"] == made.days(50e9)
    assert not found["vocabulary_assumed"]


def test_a_shipped_configuration_is_planned_as_it_would_train(plans):
    (found,) = plans("300m-moe-12gb")
    made = plan(CHAPTER, "rtx3060", 8, 1024, accumulate=16)
    assert found["parameters"] == {"total": 340_952_064, "active": 199_394_304}
    assert found["step_tokens"] == 128 * 1024
    assert found["step_ms"] == made.step_ms
    assert found["memory"]["parts"] == made.memory.parts
    assert found["vocabulary_assumed"]
    assert (found["run_tokens"] - 1) // (128 * 1024) == 4_000_000_000 // (128 * 1024)


@pytest.mark.parametrize(
    ("lines", "words", "step"),
    [
        (["[train]", "global_batch_size = 64"], [], (8, 512, 8)),
        (["[train]", "global_batch_size = 6"], [], (6, 512, 1)),
        (["[train]", "global_batch_size = 63"], [], (7, 512, 9)),
        (["[train]", "global_batch_size = 64", "micro_batch_size = 4"], [], (4, 512, 16)),
        (["[train]", "global_batch_size = 64"], ["--batch", "32"], (32, 512, 2)),
        (["[train]", "global_batch_size = 64"], ["--batch", "48"], (48, 512, 2)),
        (["[train]", "global_batch_size = 64"], ["--accumulate", "3"], (8, 512, 3)),
        (["[train]", "micro_batch_size = 16"], [], (16, 512, 1)),
        (["[data]", "seq_len = 300"], [], (8, 300, 1)),
        (["[data]", "seq_len = 300"], ["--seq", "200"], (8, 200, 1)),
        (["[data]", "seq_len = 3000"], [], (8, 3000, 1)),
        (["[model]", "max_seq_len = 100"], [], (8, 100, 1)),
        (["[data]", "seq_len = 300", "[model]", "max_seq_len = 200"], ["--seq", "9"], (8, 9, 1)),
    ],
)
def test_the_step_is_the_files_unless_the_command_says_otherwise(plans, file, lines, words, step):
    (found,) = plans(file(*lines), *words)
    assert (found["batch"], found["seq"], found["accumulate"]) == step


def test_precision_is_the_files_unless_the_command_says_otherwise(plans, file):
    path = file("[train]", 'precision = "f32"')
    assert [plans(path, *words)[0]["mixed_precision"] for words in ([], ["--mixed-precision"])] == [
        False,
        True,
    ]
    assert not plans("--no-mixed-precision")[0]["mixed_precision"]


def test_a_vocabulary_is_assumed_only_where_none_is_named(text, plans, file):
    path = file("[model]", "d_model = 256")
    assert "the vocabulary of mine is left to the tokenizer, here it is 32,000" in text(path)
    named = plans(path, "model.vocab_size=5000")[0]
    assert (named["config"]["vocab_size"], named["vocabulary_assumed"]) == (5000, False)


def test_overrides_stand_anywhere_and_hold_for_every_shape(plans):
    found = plans("124m", "--batch", "4", "model.n_layers=8", "--seq", "256", "30m")
    assert [each["name"] for each in found] == ["124m", "30m"]
    assert [each["config"]["n_layers"] for each in found] == [8, 8]
    assert [(each["batch"], each["seq"]) for each in found] == [(4, 256)] * 2


def test_the_page_says_what_the_plan_says(text):
    page = text("300m-moe-12gb", "--card", "rtx4090", "--tokens", "3.5B")
    made = plan(CHAPTER, "rtx4090", 8, 1024, accumulate=16)
    assert page.startswith(
        "300m-moe-12gb on RTX 4090: 341.0M parameters, 199.4M of them active, micro-batch 8\n"
    )
    for name, size in made.memory.parts.items():
        assert line(page, f"{name}  ")[:2] == [
            f"{size / MIB:,.0f}", f"{size / made.memory.peak_bytes:.1%}",
        ]  # fmt: skip
    assert line(page, "peak")[0] == f"{made.memory.peak_bytes / MIB:,.0f}"
    assert line(page, "needed")[0] == f"{made.memory.needed_bytes / MIB:,.0f}"
    assert " ".join(line(page, "needed")[1:]).startswith("the card has 24,576: fits, ")
    assert line(page, "largest micro-batch")[0] == str(made.largest_micro_batch())
    for name, ms in made.ms_by_part().items():
        assert line(page, f"{name}  ")[1] == f"{ms / made.step_ms:.1%}"
    assert line(page, "step  ") == [f"{made.step_ms:,.0f}"]
    assert line(page, "tokens/s") == [f"{made.tokens_per_s:,.0f}"]
    assert line(page, "TFLOPS") == [f"{made.tflops:.3g}", "MFU", f"{made.mfu:.1%}", "of", "165"]
    assert line(page, "3.5B tokens")[0] == f"{made.days(3.5e9) * 24:.1f}"
    assert line(page, "3.99B tokens")[2:5] == ["recommended:", "20", "for"]
    assert line(page, "4B tokens")[2:] == ["what", "300m-moe-12gb", "asks", "for"]
    assert line(page, "d_model / n_layers")[:2] == ["51.2", "inside"]
    closing = page.split("\n\n")[-1]
    assert closing.startswith("All of this is predicted")
    assert "docs/baseline.md" in closing


@pytest.mark.parametrize(
    "words",
    [
        ["300m-moe-12gb", "--batch", "64", "--operations"],
        ["--compare", "--operations"],
        ["124m", "--card", "all"],
        ["124m", "--seq", "1", "--batch", "1", "--card", "h100"],
        ["model.d_model=8192", "model.n_layers=90", "--budget-mib", "5", "--batch", "1000000"],
    ],
    ids=" ".join,
)
def test_nothing_is_wider_than_100_columns(text, words):
    assert max(map(len, text(*words).splitlines())) <= 100


def test_what_does_not_fit_comes_with_the_six_remedies(text):
    page = text("300m-moe-12gb", "--batch", "32", "--accumulate", "1")
    assert "the card has 12,288: does not fit, " in page
    listed = " ".join(page.partition("It does not fit.")[2].partition("Time of a step")[0].split())
    for number, each in enumerate(
        remedies(CHAPTER, "rtx3060", 32, 1024, mixed_precision=True), start=1
    ):
        assert f"{number}. {each}" in listed
    assert "It does not fit" not in text("300m-moe-12gb")


def test_a_budget_narrows_the_card_and_never_widens_it(plans, text):
    need = plans("30m")[0]["memory"]["needed_bytes"]
    over, under = -(-need // MIB), need // MIB
    assert plans("30m", "--budget-mib", str(over))[0]["memory"]["fits"]
    assert not plans("30m", "--budget-mib", str(under))[0]["memory"]["fits"]
    assert f"the budget is {under:,}: does not fit, 1 too many" in text(
        "30m", "--budget-mib", str(under)
    )
    made = plan(CHAPTER, "rtx3060", 8, 1024, accumulate=16)
    (found,) = plans("300m-moe-12gb", "--budget-mib", "9000")
    assert found["memory"]["largest_micro_batch"] == made.largest_micro_batch(9000 * MIB)
    assert found["memory"]["largest_micro_batch"] < made.largest_micro_batch()
    large = plans("300m-moe-12gb", "--batch", "16", "--budget-mib", "90000")[0]["memory"]
    assert not large["fits"]
    assert large["largest_micro_batch"] == made.largest_micro_batch()


def test_columns_hold_what_each_shape_has_alone(text, plans):
    page, names = text("124m", "300m-moe-12gb", "30m"), ["124m", "300m-moe-12gb", "30m"]
    assert page.startswith("3 shapes on RTX 3060 12 GB\n")
    alone = [plans(name)[0] for name in names]
    assert line(page, "124m  ") == names[1:]
    assert line(page, "step  ") == [f"{each['step_ms']:,.0f}" for each in alone]
    assert line(page, "tokens/s") == [f"{each['tokens_per_s']:,.0f}" for each in alone]
    assert line(page, "experts") == ["-", f"{alone[1]['ms_by_part']['experts']:,.0f}", "-"]
    assert line(page, "fits") == ["yes"] * 3
    assert "124m is too deep and narrow" in page
    assert "30m is inside" not in page


def test_a_column_that_does_not_fit_says_so(text):
    page = text("300m-moe-12gb", "30m", "--batch", "32")
    assert line(page, "fits") == ["NO", "yes"]
    assert "what does not fit, 300m-moe-12gb: planned alone" in page


def test_one_shape_on_every_card(text, plans):
    found = plans("124m", "--card", "all")
    assert [each["card"]["key"] for each in found] == list(CARDS)
    page = text("124m", "--card", "all")
    assert page.startswith("124m on 7 cards: 123.7M total")
    heads = [row.split() for row in page.splitlines() if row.split() and row.split()[0] in CARDS]
    assert [key for row in heads for key in row] == list(CARDS)


def test_columns_that_do_not_fit_a_line_follow_below(text, tmp_path):
    names = [f"a-shape-with-a-long-name-{at}" for at in range(5)]
    for name in names:
        (tmp_path / f"{name}.toml").write_text("[model]\nvocab_size = 100")
    page = text(*(str(tmp_path / f"{name}.toml") for name in names))
    assert max(map(len, page.splitlines())) <= 100
    heads = [row.split() for row in page.splitlines() if row.strip().startswith("a-shape")]
    assert heads == [names[:2], names[2:4], names[4:]]
    assert sum(row.startswith("tokens/s") for row in page.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["124m", "300m-moe-12gb", "30m", "tiny-cpu"]),
        (["30m"], ["30m", "124m", "300m-moe-12gb", "tiny-cpu"]),
        (["30m", "124m"], ["30m", "124m"]),
        (["30m", "124m", "30m"], ["30m", "124m"]),
    ],
)
def test_fewer_than_two_are_compared_with_the_shipped_ones(plans, words, names):
    assert [each["name"] for each in plans(*words, "--compare")] == names


def test_files_of_one_name_keep_their_folders(plans, tmp_path):
    paths = [tmp_path / folder / "mine.toml" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("")
    assert [each["name"] for each in plans(*map(str, paths))] == list(map(str, paths))
    assert [each["name"] for each in plans(str(paths[0]), str(paths[0]))] == ["mine"]


def test_every_operation_is_listed_and_they_add_up(text, plans):
    page = text("--operations").partition("Operation")[2]
    made = plan(TransformerConfig(), "rtx3060", 8, 1024)
    head, *rows = page.splitlines()
    at = len("Operation") + head.index("limited by")
    for each, row in zip(made.operations, rows, strict=False):
        assert row.startswith(f"  {each.operation.name}  ")
        assert row[at - 2 :] == f"  {each.limit}"
    head = [each for each in made.operations if each.operation.name == "head products"]
    assert line(page, "head products") == [
        f"{head[0].operation.flops / 1e9:,.1f}", f"{head[0].operation.bytes / MIB:,.0f}",
        f"{head[0].operation.launches:.0f}", f"{head[0].ms:.1f}", "products",
    ]  # fmt: skip
    total = line(page, "in all")
    assert total[0] == f"{sum(each.operation.flops for each in made.operations) / 1e9:,.1f}"
    assert total[-1] == f"{made.step_ms:,.0f}"
    (found,) = plans()
    gaps = found["ms_by_part"]["gaps between launches"]
    assert sum(each["ms"] for each in found["operations"]) + gaps == pytest.approx(made.step_ms)
    assert "Operation" not in text()


def test_the_json_object_has_the_rates_with_their_sources(text):
    found = json.loads(text("30m", "124m", "--json"))
    assert found["predicted"] is True
    assert len(found["plans"]) == 2
    assert {"products", "kernels", "stream", "gap between launches"} < set(found["rates"])
    assert all(rate["source"] for rate in found["rates"].values())
    used = {each["rate"] for made in found["plans"] for each in made["operations"]}
    assert used <= set(found["rates"])
    assert len(found["plans"][0]["remedies"]) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--card", "rtx5090"], "card 'rtx5090' is not known: choose among rtx3060, "),
        (["--seq", "4096"], "a sequence of 4096 tokens is longer than the model's max_seq_len"),
        (["30m", "tiny-cpu", "--seq", "600"], "tiny-cpu: a sequence of 600 tokens is longer"),
        (["--batch", "0"], "--batch must be a whole number from 1 "),
        (["--seq", "1.5"], "--seq must be a whole number from 1 "),
        (["--accumulate", "x"], "--accumulate must be a whole number from 1 "),
        (["--budget-mib", "-1"], "--budget-mib must be a whole number from 0 "),
        (["--tokens", "many"], "--tokens must be a number of tokens from 1 up"),
        (["nowhere.toml"], "there is no configuration 'nowhere.toml': give a TOML file, or one "),
        (["model.d_modle=3"], "unknown setting model.d_modle; did you mean model.d_model?"),
        (["model.n_layers=3"], "[model] moe_layers names layer 3, but n_layers is 3"),
        (["30m", "train.precision=8"], 'train.precision must be "f32" or "bf16-mixed", got 8'),
        (["30m", "model.max_seq_len=9"], "model.max_seq_len must be at least data.seq_len"),
        (["30m", "124m", "--card", "all"], "--card all puts one shape on every card, got 2"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_slip_is_one_sentence(capsys, words, said):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"fastbrain: {said}")


def test_a_file_that_is_not_a_table_of_tables_is_refused(capsys, file):
    for body in ("data = 3", "train = 3", "model = 3"):
        assert run(file(body)) == 2
        assert "must be a table of settings, got 3" in capsys.readouterr().err


CPU = Card("this-machine", "this CPU, 2 threads", 2, 0, 1e10, 5e10, 1e10, 8 * 2**30, is_cpu=True)


def test_this_machine_may_be_a_cpu(monkeypatch, text, plans):
    monkeypatch.setattr(plan_asked, "find_card", {"this-machine": CPU}.__getitem__)
    page = text("tiny-cpu", "--card", "this-machine")
    assert page.startswith("tiny-cpu on this CPU, 2 threads: ")
    assert "the machine has 8,192: fits, " in page
    assert "FP32 operands" in page
    assert "outside of the allocator" not in page
    assert "gaps between launches" not in page


def test_memory_of_unknown_size_is_said_to_be(monkeypatch, text, plans):
    monkeypatch.setattr(plan_asked, "find_card", lambda _: replace(CPU, memory_bytes=0))
    page = text("tiny-cpu", "--card", "this-machine")
    assert "how much this machine has is unknown" in page
    assert "largest micro-batch" not in page
    assert "It does not fit" not in page
    memory = plans("tiny-cpu", "--card", "this-machine")[0]["memory"]
    assert (memory["fits"], memory["largest_micro_batch"]) == (True, None)
    budget = plans("tiny-cpu", "--card", "this-machine", "--budget-mib", "100")[0]["memory"]
    assert not budget["fits"]


def test_a_card_that_is_named_needs_no_torch():
    script = """
import argparse, sys
from fastbrain.commands import plan
from fastbrain.training.command import parse
parser = argparse.ArgumentParser()
plan.add_arguments(parser)
for words in (["--compare"], ["124m", "--card", "h200", "--json"], ["--card", "no"], ["--help"]):
    try:
        print("code", plan.run(parse(parser, words)))
    except SystemExit as exit:
        print("code", exit.code)
    for heavy in ("torch", "triton", "matplotlib"):
        assert heavy not in sys.modules, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = [row for row in done.stdout.splitlines() if row.startswith("code")]
    assert codes == ["code 0", "code 0", "code 2", "code 0"]
    assert "fastbrain plan 300m-moe-12gb --card rtx4090" in done.stdout
    assert "rtx3060, rtx3090, rtx4060ti, rtx4090, a100, h100, h200" in done.stdout


def test_a_reader_that_stops_early_is_no_error():
    script = """
import argparse
from fastbrain.commands import plan
from fastbrain.training.command import parse
parser = argparse.ArgumentParser()
plan.add_arguments(parser)
raise SystemExit(plan.run(parse(parser, ["30m"])))
"""
    done = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout is not None
    done.stdout.close()
    done.stdout = None
    assert done.communicate() == (None, "")
    assert done.returncode == 0
