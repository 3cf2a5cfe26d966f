"""`python -m fastbrain.sweep_arch --ranks`: predicted of several from what one was measured at."""

import json
import subprocess
from dataclasses import replace

import pytest
from test_sweep_arch import CARD, MIB, SMALL, fake, on_card

from fastbrain.plan import LINKS, communication, find_link, memory
from fastbrain.sweep_arch import command, table
from fastbrain.sweep_arch.line import line
from fastbrain.sweep_arch.place import Place
from fastbrain.sweep_arch.prediction import device_card
from fastbrain.sweep_arch.request import request_of

CHAPTER = ["32000", "1024", "20", "8", "512", "1", "8", "2"]


def asked(*words):
    return request_of(command._parser().parse_intermixed_args(words))


@pytest.fixture
def found(monkeypatch, capsys):
    """What the document of a step of 250 ms on the home card has of ranks."""

    def predicted(*words, card=CARD):
        code, document, _ = on_card(monkeypatch, capsys, words, card=card)
        assert code == 0
        return document["predicted_ranks"]

    return predicted


def test_a_step_of_ranks_is_the_measured_one_and_what_is_waited_for(found):
    config = asked(*CHAPTER).config
    for kind in ("ddp", "fsdp"):
        got = found(*CHAPTER, "--ranks", "4", "--parallel", kind, "--link", "ethernet10")
        sent = communication(config, kind, 4, find_link("ethernet10"), 250.0)
        assert got["predicted"] is True
        assert (got["ranks"], got["parallel"], got["because"]) == (4, kind, "as asked for")
        assert (got["link"]["key"], got["link"]["gb_per_s"]) == ("ethernet10", 1.125)
        assert got["sent_bytes"] == sent.sent_bytes
        assert got["communication_ms"] == sent.ms
        assert got["exposed_ms"] == sent.exposed_ms > 0
        assert got["step_ms"] == 250 + sent.exposed_ms
        rate = 4 * 8 * 512 / got["step_ms"] * 1e3
        assert got["tokens_per_s"] == pytest.approx(rate)
        assert got["efficiency"] == pytest.approx(250 / got["step_ms"])
        assert got["days"] == pytest.approx(50e9 / rate / 86_400)


def test_the_memory_is_that_of_a_rank(found):
    request, card = asked(*CHAPTER), device_card(CARD)
    for kind, accumulate, shards in (("ddp", 2, 1), ("fsdp", 1, 4)):
        got = found(*CHAPTER, "--ranks", "4", "--parallel", kind)
        made = memory(request.config, card, 8, 512, True, accumulate, shards)
        assert (got["peak_bytes"], got["needed_bytes"]) == (made.peak_bytes, made.needed_bytes)


def test_auto_goes_by_the_device_and_the_budget(found):
    words = [*CHAPTER, "--ranks", "2"]
    needed = found(*words)["needed_bytes"] // MIB + 1
    assert found(*words, "--budget-mib", str(needed))["parallel"] == "ddp"
    assert found(*words, "--budget-mib", str(needed - 1))["parallel"] == "fsdp"
    # of a card that is in no table its own memory counts
    for gib, kind in ((6, "fsdp"), (48, "ddp")):
        card = replace(CARD, name="RTX 5080", total_bytes=gib * 2**30)
        assert found(*words, card=card)["parallel"] == kind


def test_the_usual_link_between_cards_is_that_of_the_plan(found):
    assert found(*SMALL, "--ranks", "2")["link"]["key"] == "pcie4x8"


def test_between_cpus_it_is_that_of_machines(capsys):
    assert command.main([*SMALL, "--device", "cpu", "--ranks", "2", "--json"], fake()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["predicted_ranks"]["link"]["key"] == "ethernet1"


def test_a_second_line_says_that_it_is_predicted(capsys):
    words = [*SMALL, "--device", "cpu", "--ranks", "4", "--link", "12.5", "--tokens", "1B"]
    assert command.main(words, fake()) == 0
    measured, predicted = capsys.readouterr().out.splitlines()
    assert command.main([*words, "--json"], fake()) == 0
    document = json.loads(capsys.readouterr().out)
    got = document["predicted_ranks"]
    assert measured.startswith("v1000 d64 L3 2x32 moe8x2 ")
    assert predicted == (
        f"  predicted, 4 ranks by ddp over 12.5 GB/s: {round(got['needed_bytes'] / MIB)} MiB a "
        f"rank  communication {got['communication_ms']:.1f} ms a step, {got['exposed_ms']:.1f} of "
        f"them waited for  {got['tokens_per_s']:.0f} tok/s of all  {got['days']:.1f} days for 1B"
    )
    assert line(document) == f"{measured}\n{predicted}"


def test_a_reader_that_stops_early_is_no_error(monkeypatch):
    def closed(*words, **options):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    assert command.main([*SMALL, "--device", "cpu", "--ranks", "2"], fake()) == 0


def test_one_rank_says_nothing_of_ranks(capsys):
    assert command.main([*SMALL, "--device", "cpu", "--ranks", "1"], fake()) == 0
    assert "predicted" not in capsys.readouterr().out
    assert command.main([*SMALL, "--device", "cpu", "--json"], fake()) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ranks"] is None


def test_the_table_has_columns_of_ranks_where_a_row_asks(tmp_path, capsys):
    documents = []
    for words in (["--ranks", "2", "--link", "nvlink"], []):
        command.main([*SMALL, "--device", "cpu", "--json", *words], fake())
        documents.append(json.loads(capsys.readouterr().out))
    path = tmp_path / "shapes.txt"

    def markdown(*answers):
        path.write_text("\n".join(f"row {at}" for at in range(len(answers))))
        left = list(answers)

        def launch(words):
            answer = left.pop(0)
            out = "" if answer is None else json.dumps(answer)
            return subprocess.CompletedProcess(words, int(answer is None), out, "")

        table.run(path, [], launch=launch)
        rows = path.with_suffix(".md").read_text().splitlines()
        return [each[1:-1].split("|") for each in rows if each.startswith("|")]

    head, _, several, one, failed = markdown(*documents, None)
    assert [each.strip() for each in head[-5:]] == [
        "predicted: ranks", "predicted: memory of a rank", "predicted: communication, ms",
        "predicted: waited for, ms", "predicted: tok/s of all ranks",
    ]  # fmt: skip
    got = documents[0]["predicted_ranks"]
    assert [each.strip() for each in several[-5:]] == [
        "2 ddp, NVLink bridge of two RTX 3090",
        f"{round(got['needed_bytes'] / MIB)} MiB",
        f"{got['communication_ms']:.1f}",
        f"{got['exposed_ms']:.1f}",
        f"{got['tokens_per_s']:.0f}",
    ]
    for row in (one, failed):
        assert not any(each.strip() for each in row[-5:])
    head, _, one = markdown(documents[1])
    assert not any("predicted" in each for each in head)
    assert len(one) == len(head)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "argument --ranks: must be a whole number from 1 "),
        (["--ranks", "1.5"], "argument --ranks: must be a whole number from 1 "),
        (["--ranks", "2", "--parallel", "both"], "argument --parallel: must be auto, ddp or fsdp"),
        (["--ranks", "2", "--link", "isdn"], "argument --link: link 'isdn' is not known: choose "
         f"among {', '.join(LINKS)}, or give the GB/s"),
    ],
)  # fmt: skip
def test_a_word_that_is_none_is_refused(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        command.main([*SMALL, *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--link", "nvlink"], ["--parallel", "ddp", "--ranks", "1"]])
def test_what_is_of_several_ranks_is_refused_of_one(capsys, words):
    assert command.main([*SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fastbrain: {words[0]} says something of several ranks, and there is ")
    assert "add --ranks 2" in said


def test_a_device_is_the_plans_card():
    assert device_card(CARD).key == "rtx3060"
    assert device_card(Place.find("cpu")).is_cpu
