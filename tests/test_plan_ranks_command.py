"""`fastbrain plan --ranks`: what is printed of several ranks, and what is refused."""

import argparse
import json
from typing import Any

import pytest

from fastbrain import cli
from fastbrain.commands import plan as command
from fastbrain.commands import plan_picture
from fastbrain.commands.plan_asked import planned
from fastbrain.plan import LINKS, plan, remedies
from fastbrain.training.command import parse

MIB = 2**20


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parse(parser, words)


@pytest.fixture
def text(capsys):
    def said(*words: str) -> str:
        assert command.run(options(*words)) == 0
        return capsys.readouterr().out

    return said


@pytest.fixture
def plans(text):
    def found(*words: str) -> list[dict[str, Any]]:
        return json.loads(text(*words, "--json"))["plans"]

    return found


def line(page: str, start: str) -> list[str]:
    """The words after the start of the only line that has it."""
    (found,) = [each for each in page.splitlines() if each.strip().startswith(start)]
    return found.strip().removeprefix(start).split()


def flat(page: str) -> str:
    return " ".join(page.split())


@pytest.fixture
def chapter():
    (found,) = planned(options("300m-moe-12gb"))
    return found.plan.config


def test_the_page_says_what_the_plan_says(text, chapter):
    page = text("300m-moe-12gb", "--ranks", "4", "--link", "ethernet10", "--parallel", "fsdp")
    made = plan(chapter, accumulate=4, ranks=4, parallel="fsdp", link="ethernet10")
    assert page.startswith("300m-moe-12gb on 4 x RTX 3060 12 GB: ")
    assert (
        "a step is 4 micro-batches of 8 rows of 1,024 tokens on each of 4 ranks, 131,072 tokens in "
        "all, BF16 operands"
    ) in flat(page)
    assert (
        "4 ranks by FSDP2, a shard of it on each (as asked for); between them Ethernet 10 Gbit/s, "
        "1.12 GB/s in each direction (0.9 of 1.25 assumed)"
    ) in flat(page)
    assert "Memory of each rank " in page
    assert "each card has 12,288: fits, " in page
    for name, size in made.memory.parts.items():
        assert line(page, f"{name}  ")[0] == f"{size / MIB:,.0f}"
    assert line(page, "largest micro-batch")[0] == str(made.largest_micro_batch())
    sent = made.communication
    assert line(page, "sent, MiB")[0] == f"{sent.sent_bytes / MIB:,.0f}"
    assert line(page, "it takes, ms") == [f"{sent.ms:,.0f}"]
    assert line(page, "hidden, ms")[0] == f"{sent.hidden_ms:,.0f}"
    assert line(page, "waited for, ms")[0] == f"{sent.exposed_ms:,.0f}"
    assert line(page, "waiting for other ranks")[:2] == [
        f"{sent.exposed_ms:,.0f}", f"{sent.exposed_ms / made.step_ms:.1%}",
    ]  # fmt: skip
    assert "Speed of all ranks" in page
    assert line(page, "tokens/s") == [f"{made.tokens_per_s:,.0f}"]
    assert line(page, "efficiency")[0] == f"{made.efficiency:.1%}"
    closing = flat(page.split("\n\n")[-1])
    assert closing.startswith("All of this is predicted, no step was run. The rates of links are ")
    assert "python -m bench.scaling" in closing


def test_auto_says_which_and_why(text):
    page = flat(text("300m-moe-12gb", "--ranks", "2"))
    assert "2 ranks by DDP, the whole model on each (the whole model fits each rank: 11," in page
    assert "PCIe 4.0 x8, 11 GB/s in each direction (0.7 of 15.8 assumed)" in page
    page = flat(text("300m-moe-12gb", "--ranks", "2", "--budget-mib", "11000"))
    assert "2 ranks by FSDP2, a shard of it on each (the whole model would need 11," in page
    assert "which has 11,000)" in page


def test_a_step_of_one_micro_batch_is_still_of_all_ranks(text):
    page = flat(text("30m", "--ranks", "4", "--accumulate", "1", "--link", "12.5"))
    assert "a step is 8 rows of 512 tokens on each of 4 ranks, 16,384 tokens in all, BF16" in page
    assert "; between them 12.5 GB/s in each direction, as given the vocabulary" in page


def test_one_rank_prints_nothing_of_ranks(text):
    page = text("30m", "--ranks", "1")
    assert page == text("30m")
    assert page.split("\n\n")[1].startswith("Memory ")
    for each in (page, text("30m", "124m")):
        assert "rank" not in each
        assert "efficiency" not in each


@pytest.mark.parametrize(
    ("lines", "words", "step"),
    [
        (["global_batch_size = 64"], [], (8, 4, 64)),
        (["global_batch_size = 6"], [], (3, 1, 6)),
        (["global_batch_size = 7"], [], (4, 1, 8)),
        (["global_batch_size = 64", "micro_batch_size = 4"], [], (4, 8, 64)),
        (["global_batch_size = 64"], ["--batch", "16"], (16, 2, 64)),
        (["global_batch_size = 64"], ["--accumulate", "3"], (8, 3, 48)),
        ([], [], (8, 1, 16)),
    ],
)
def test_the_rows_of_a_step_are_those_of_all_ranks(plans, tmp_path, lines, words, step):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(["[train]", *lines]))
    (found,) = plans(str(path), "--ranks", "2", *words)
    rows = found["step_tokens"] // found["seq"]
    assert (found["batch"], found["accumulate"], rows) == step


def test_the_file_says_how_the_ranks_share_unless_the_command_does(plans, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[train]\nparallel = "fsdp"\n')
    assert plans(str(path), "--ranks", "2")[0]["parallel"] == "fsdp"
    assert plans(str(path), "--ranks", "2", "--parallel", "ddp")[0]["parallel"] == "ddp"
    assert plans(str(path), "--ranks", "2", "--parallel", "auto")[0]["parallel"] == "ddp"
    assert plans(str(path))[0]["parallel"] is None


def test_the_json_object_has_the_link_with_its_source(plans, chapter):
    (found,) = plans("300m-moe-12gb", "--ranks", "4", "--link", "25")
    made = plan(chapter, accumulate=4, ranks=4, link=25)
    assert (found["ranks"], found["parallel"]) == (4, "ddp")
    assert found["parallel_because"].startswith("the whole model fits each rank")
    assert (found["link"]["gb_per_s"], found["link"]["source"]) == (25, "as given")
    assert found["communication"] == {
        "sent_bytes": made.sent_bytes,
        "ms": made.communication_ms,
        "exposed_ms": made.communication.exposed_ms,
    }
    assert found["step_ms"] == made.step_ms
    assert found["tokens_per_s"] == made.tokens_per_s
    assert found["efficiency"] == made.efficiency
    (alone,) = plans("300m-moe-12gb")
    names = ("parallel", "parallel_because", "link", "communication")
    assert [alone[name] for name in names] == [None] * 4
    assert (alone["ranks"], alone["efficiency"]) == (1, 1)


def test_ways_out_are_those_of_a_rank(plans, chapter):
    (found,) = plans("300m-moe-12gb", "--ranks", "2", "--parallel", "fsdp", "--batch", "32")
    made = remedies(chapter, "rtx3060", 32, 1024, mixed_precision=True, accumulate=2, shards=2)
    assert [each["saved_bytes"] for each in found["remedies"]] == [e.saved_bytes for e in made]


def test_columns_hold_what_each_shape_has_alone(text, plans):
    words = ["--ranks", "4", "--link", "ethernet2.5"]
    page = text("300m-moe-12gb", "30m", "--batch", "10", *words)
    alone = [plans(name, "--batch", "10", *words)[0] for name in ("300m-moe-12gb", "30m")]
    assert page.startswith("2 shapes on 4 x RTX 3060 12 GB\n  4 ranks, between them Ethernet 2.5 ")
    assert line(page, "ranks  ") == ["4", "fsdp", "4", "ddp"]
    assert line(page, "gathered weights")[1] == "-"
    sent = [each["communication"] for each in alone]
    assert line(page, "sent by each rank, MiB") == [f"{e['sent_bytes'] / MIB:,.0f}" for e in sent]
    assert line(page, "it takes, ms") == [f"{each['ms']:,.0f}" for each in sent]
    assert line(page, "waited for, ms") == [f"{each['exposed_ms']:,.0f}" for each in sent]
    assert line(page, "efficiency") == [f"{each['efficiency']:.1%}" for each in alone]
    assert line(page, "tokens/s") == [f"{each['tokens_per_s']:,.0f}" for each in alone]
    cards = text("30m", "--card", "all", *words)
    assert cards.startswith("30m on 4 of each of 7 cards: ")


def test_operations_and_waiting_add_up(text, plans):
    words = ["300m-moe-12gb", "--ranks", "4", "--link", "1", "--parallel", "fsdp"]
    table = text(*words, "--operations").partition("Operation")[2]
    (found,) = plans(*words)
    assert line(table, "copies of what is sent")[-1] == "bytes"
    waited = found["communication"]["exposed_ms"]
    assert line(table, "waiting for other ranks") == [f"{waited:,.0f}"]
    assert line(table, "in all")[-1] == f"{found['step_ms']:,.0f}"
    gaps = found["ms_by_part"]["gaps between launches"]
    computed = sum(each["ms"] for each in found["operations"]) + gaps
    assert computed + waited == pytest.approx(found["step_ms"])


@pytest.mark.parametrize(
    "words",
    [
        ["300m-moe-12gb", "--ranks", "1024", "--link", "1e-9", "--operations"],
        ["--compare", "--ranks", "4", "--parallel", "fsdp"],
        ["124m", "--card", "all", "--ranks", "16", "--link", "ethernet100"],
    ],
    ids=" ".join,
)
def test_nothing_is_wider_than_100_columns(text, words):
    assert max(map(len, text(*words).splitlines())) <= 100


def test_the_picture_is_of_all_ranks_and_of_the_memory_of_each():
    pytest.importorskip("matplotlib")
    words = ["300m-moe-12gb", "30m", "--ranks", "4", "--parallel", "fsdp"]
    found = planned(options(*words, "--batch", "1", "--seq", "16"))
    speed, memory = plan_picture.figure(found).axes
    title = speed.figure.get_suptitle()
    assert title == "Predicted: 2 shapes on 4 x RTX 3060 12 GB, micro-batch 1 x 16 tokens"
    assert speed.get_ylabel() == "predicted tokens/s of all ranks"
    assert memory.get_xlabel() == "predicted memory of a step of each rank, GiB"
    assert [label.get_text().split("\n")[0] for label in memory.get_yticklabels()] == [
        "300m-moe-12gb, fsdp", "30m, fsdp",
    ]  # fmt: skip
    drawn = {bars.get_label() for bars in memory.containers}
    assert {"gathered weights", "unsharded gradients"} < drawn
    for at, each in enumerate(found):
        widths = [bars.patches[at].get_width() for bars in memory.containers]
        assert sum(widths) * 2**30 == pytest.approx(each.plan.memory.needed_bytes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "--ranks must be a whole number from 1 "),
        (["--ranks", "1.5"], "--ranks must be a whole number from 1 "),
        (["--ranks", "2", "--link", "pcie9"], f"link 'pcie9' is not known: choose among "
         f"{', '.join(LINKS)}, or give the GB/s that it carries in each direction, a number "),
        (["30m", "124m", "--ranks", "2", "--link", "pcie9"], "link 'pcie9' is not known: "),
        (["--ranks", "2", "--link=-1"], "link '-1' is not known: choose among pcie3x8, "),
        (["--ranks", "2", "--parallel", "DDP"], "--parallel must be auto, ddp or fsdp, got 'DDP'"),
        (["--link", "nvlink"], "--link says something of several ranks, and there is one: add "
         "--ranks 2, or leave --link out"),
        (["--parallel", "fsdp", "--ranks", "1"], "--parallel says something of several ranks, "),
        (["30m", "train.parallel=tensor", "--ranks", "2"], "train.parallel must be "),
    ],
)  # fmt: skip
def test_a_slip_is_one_sentence(capsys, words, said):
    assert command.run(options(*words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"fastbrain: {said}")


def test_rows_that_training_would_refuse_are_said_to_be_others(capsys, tmp_path):
    config = tmp_path / "eight.toml"
    config.write_text("[train]\nglobal_batch_size = 8\nmicro_batch_size = 2\nmax_steps = 1\n")
    words = ["plan", str(config), "model.n_layers=2", "model.moe_layers=[]", "model.d_model=64"]
    said = {}
    for ranks in ("2", "3"):
        assert cli.main([*words, "--seq", "64", "--ranks", ranks]) == 0
        said[ranks] = " ".join(capsys.readouterr().out.split())
    assert "and training would refuse it: this is a plan of 12" in said["3"]
    assert "would refuse" not in said["2"]
