"""The page of speeds: the same bytes every time, whole, and made of nothing but its sources."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from result_files import (
    KINDS,
    MACHINE,
    SHAPE,
    cells,
    device_check,
    flat,
    lines_with,
    put,
    sweep,
    training_step,
)

from bench import published
from bench.published import Range
from bench.report import cited, measured, predicted, shapes, validated
from bench.report.__main__ import SECTIONS, main
from bench.report.markdown import block, bullets, number, prose, signed_percent, span, table
from bench.shapes import CARD, TOY, TRAINING

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_two_runs_write_the_same_bytes(folder, tmp_path):
    for kind, document in KINDS.items():
        put(folder, document(), f"{kind.replace(' ', '-')}.json")
    pages = []
    for seed in ("1", "2"):
        page = tmp_path / f"{seed}.md"
        command = [sys.executable, "-m", "bench.report", "--page", page, "--results", folder]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True)
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]
    assert len(pages[0]) > 20_000


def test_the_page_is_made_without_torch():
    code = "import sys; from bench.report.__main__ import whole; whole([])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("row", published.step_rows(), ids=lambda row: row.id)
def test_every_published_step_is_on_the_page_with_its_days(row):
    wanted = [number(peak) for peak in (*row.peak_mib, row.device_peak_mib) if peak is not None]
    wanted += [span(row.contended_tokens_per_s)] if row.contended_tokens_per_s else []
    if row.tokens_per_s is not None:
        wanted += [span(row.tokens_per_s), number(row.days, 1)]
    found = [cells(line) for line in lines_with(cited.section(), "|")]
    assert any(all(each in line for each in wanted) for line in found)


@pytest.mark.parametrize("name", dict.fromkeys(row.table for row in published.step_rows()))
def test_every_table_of_published_steps_has_all_its_rows_and_their_notes(name):
    section = "\n".join(cited._steps(name))
    rows = [line for line in lines_with(section, "|") if not line.startswith("| ---")]
    assert len(rows) == 1 + len(cited.rows_of(name))
    for row in cited.rows_of(name):
        assert row.source in section
        assert row.note in flat(section)


def test_every_published_kernel_is_on_the_page():
    for each in published.kernel_tables():
        text = "\n".join(cited._kernels(each))
        for row in each.rows:
            [line] = [line for line in lines_with(text, row.name) if cells(line)[0] == row.name]
            assert cells(line)[1] == number(row.ms, 2)
            assert cells(line)[-1] == (f"counted in: {row.part_of}" if row.part_of else row.note)


def test_contention_is_explained_with_the_published_pairs():
    text = flat(cited.section())
    assert "2.05 to 2.36 times slower" in text
    assert "5,754 MiB" in text
    assert "1.69 times as many" in text
    assert "sweep_arch` warns" in text


def test_the_invalid_column_says_so():
    [header] = lines_with(cited.section(), "INVALID")
    [row] = [r for r in published.step_rows() if r.id == "unfused-dense-102m-1x512"]
    place = next(n for n, cell in enumerate(cells(header)) if "INVALID" in cell)
    assert number(row.peers.pytorch) in [
        cells(line)[place] for line in lines_with(cited.section(), "| 1 x 512 |", "9,229")
    ]


def test_our_peak_stands_beside_every_published_one():
    text = predicted.section([])
    for case in predicted.cases():
        kept = [row.peak_mib.kept for row in case.rows if row.peak_mib.kept is not None]
        ours = number(case.plan.memory.peak_bytes / 2**20)
        lines = [line for line in map(cells, lines_with(text, "|")) if line[:2] == case.cells]
        assert len(lines) == 2
        assert lines[1][2] == ours
        assert lines[1][3] == (number(kept[0]) if kept else "")


def test_every_title_of_a_prediction_says_so():
    for text in (predicted.section([]), validated.section()):
        titles = lines_with(text, "### ")
        assert titles
        assert all("PREDICTED" in title for title in titles)


def test_the_chapters_model_is_predicted_with_its_own_counts():
    first, _, swept = predicted.chapter_cases()
    assert first.config.parameter_counts() == (340_952_064, 199_394_304)
    assert swept.config.parameter_counts() == (453_043_200, 219_472_896)


def test_the_bar_is_the_newest_version_and_its_fastest_run():
    bars = {tuple(case.cells): case.bar for case in predicted.cases() if case.bar}
    dense = [
        bar for (model, batch), bar in bars.items() if "101.7M" in model and batch == "4 x 1024"
    ]
    assert [bar.id for bar in dense] == ["dense-102m-4x1024"]
    moe = [bar for (model, batch), bar in bars.items() if "55.2M" in model]
    assert {bar.id for bar in moe} >= {"stage-last", "default-moe-16x512"}
    # whatever is faster, the newer version is the bar
    rows = {row.id: row for row in published.step_rows()}
    both = (rows["dense-102m-4x1024"], rows["stage-last"], rows["history-flash"])
    case = predicted.Case(SHAPE.config, 4, 1024, both)
    slower = replace(both[1], tokens_per_s=Range(1.0, 1.0))
    for order in (both, (both[2], both[1], both[0]), (slower, both[0])):
        assert replace(case, rows=order).bar in (both[1], slower)


def test_a_step_that_waits_for_python_is_named(monkeypatch):
    tiny = predicted.Case(TOY["moe"].config, 2, 64)
    assert tiny.plan.host_bound
    monkeypatch.setattr(predicted, "cases", lambda _: [tiny])
    assert f"* {', '.join(tiny.cells)}: starting its operations" in flat(predicted.section([]))


def test_the_desktop_is_counted():
    assert "beside a desktop of 1,258 MiB" in flat(predicted.section([]))


@pytest.mark.parametrize(
    ("card", "rate", "peak"),
    [
        (MACHINE["card"], ["22,222", "26.0"], "3,210"),
        ("NVIDIA GeForce RTX 3060 Ti", ["", ""], ""),
        ("NVIDIA H200", ["", ""], ""),
    ],
)
def test_the_cells_of_the_home_card_wait_for_someone_who_has_it(folder, card, rate, peak):
    assert "cells of what was measured are empty" in flat(predicted.section([]))
    machine = MACHINE | {"card": card}
    put(folder, device_check(machine=machine), "a.json")
    # slower, so it is not the one that counts
    found = put(folder, training_step(machine=machine), "b.json")
    text = predicted.section(measured.steps(found))
    assert ("measured are empty" in flat(text)) == (not peak)
    rates, peaks = (cells(line) for line in lines_with(text, "101.7M", "| 8 x 1024 |"))
    assert rates[-2:] == rate
    assert peaks[5] == peak


def test_a_training_step_fills_them_too(folder):
    text = predicted.section(measured.steps(put(folder, training_step())))
    rates, peaks = (cells(line) for line in lines_with(text, "101.7M", "| 8 x 1024 |"))
    assert rates[-2:] == ["21,002", "27.6"]
    assert peaks[5] == "4,321"
    assert not measured.steps(put(folder, training_step(results=[])))


def test_a_shape_that_only_someone_measured_gets_its_row(folder):
    text = predicted.section(measured.steps(put(folder, sweep())))
    assert lines_with(text, "55.2M", "| 16 x 512 |", "| 61,234 | 9.5 |")
    document = sweep()
    document["rows"][0]["result"]["batch"] = 3
    text = predicted.section(measured.steps(put(folder, document)))
    assert lines_with(text, "55.2M", "| 3 x 512 |", "| 61,234 | 9.5 |")
    document["rows"][0]["result"]["mixed_precision"] = False
    # predictions are in BF16
    assert not measured.steps(put(folder, document))


@pytest.mark.parametrize("row", ["dense-102m-4x1024", "stage-recorded"])
def test_the_model_of_time_is_held_to_its_bar(row, monkeypatch):
    [found] = [each for each in validated.validation() if each.row.id == row]
    bar = validated.BARS[row]
    for error, verdict in ((bar - 0.001, "met"), (-bar - 0.001, "missed")):
        changed = type(found)(found.row, 99.94, found.published_ms, error, True, "for a reason")
        monkeypatch.setattr(validated, "validation", lambda changed=changed: [changed])
        with pytest.raises(ValueError, match="empty"):
            validated.section()
        other = type(found)(found.row, 50.0, 40.0, 0.25, False, "")
        monkeypatch.setattr(validated, "validation", lambda c=changed, o=other: [o, c])
        text = validated.section()
        line = cells(lines_with(text, "99.9")[0])
        assert line[-3:] == [signed_percent(error), f"{100 * bar:.0f}%: {verdict}", "yes"]
        text = flat(text)
        assert "): for a reason." in text
        monkeypatch.setattr(validated, "validation", lambda c=changed, o=other: [c, o, c])
        assert validated.section().count("for a reason") == 1
        assert "not launch-bound (1), the mean distance is 25.0% and the largest +25.0%" in text
        assert f"launch-bound ones (1), the mean distance is {100 * abs(error):.1f}%" in text


def test_the_page_in_the_tree_is_that_of_the_results_in_the_tree():
    assert main(["--check"]) == 0


def test_check_notices_a_changed_digit(folder, tmp_path, capsys):
    put(folder, training_step())
    page = tmp_path / "page.md"
    arguments = ["--page", str(page), "--results", str(folder)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = page.read_text()
    page.write_text(text.replace("21,002", "21,003"))
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    said = capsys.readouterr().out
    assert "-| fastbrain bf16 | 21,003" in said
    assert "+| fastbrain bf16 | 21,002" in said
    # and it writes nothing
    assert "21,003" in page.read_text()


def test_a_bad_file_writes_no_page(folder, tmp_path, capsys):
    (folder / "x.json").write_text("{}")
    page = tmp_path / "page.md"
    assert main(["--page", str(page), "--results", str(folder)]) == 2
    assert "x.json" in capsys.readouterr().err
    assert not page.exists()


def test_a_section_is_the_part_of_the_page_that_its_command_prints(folder, tmp_path, capsys):
    page = tmp_path / "page.md"
    main(["--page", str(page), "--results", str(folder)])
    for section in SECTIONS:
        capsys.readouterr()
        assert main([section, "--results", str(folder)]) == 0
        printed = capsys.readouterr().out
        assert printed in page.read_text()
    for module in (cited, predicted, validated):
        assert module.COMMAND.split()[-1] in SECTIONS
        assert f"command       {module.COMMAND}\n" in page.read_text()


def test_every_table_of_figures_has_its_command_above(folder, tmp_path):
    for kind, document in KINDS.items():
        put(folder, document(), f"{kind.replace(' ', '-')}.json")
    page = tmp_path / "page.md"
    main(["--page", str(page), "--results", str(folder)])
    above = False
    for line in page.read_text().splitlines():
        above = (above or line.startswith("command ")) and not line.startswith("##")
        if line.startswith("| ---"):
            assert above


@pytest.mark.parametrize("shape", [*TRAINING.values(), *CARD.values(), *TOY.values()], ids=str)
def test_a_written_shape_is_read_back(shape):
    config, batch, seq = shapes.parse(str(shape))
    assert shapes.key(config) == shapes.key(shape.config)
    assert (batch, seq) == (shape.batch, shape.seq_len)


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_d_ff", 96), ("num_experts", 8), ("experts_per_token", 1), ("shared_expert", False)],
)
def test_experts_tell_mixtures_apart_and_not_dense_models(field, value):
    moe, dense = TOY["moe"].config, TOY["dense"].config
    assert shapes.key(replace(moe, **{field: value})) != shapes.key(moe)
    assert shapes.key(replace(dense, **{field: value})) == shapes.key(dense)


def test_what_is_no_shape_is_refused():
    with pytest.raises(ValueError, match="'no shape' is not"):
        shapes.parse("no shape")


def test_prose_is_wrapped_and_a_bullet_stays_one():
    text = "word-word " * 40
    assert max(map(len, prose(text).splitlines())) <= 110
    assert flat(prose(text)) == text.strip()
    found = bullets([text, "short"]).splitlines()
    assert [line[:2] for line in found] == ["* ", *["  "] * (len(found) - 2), "* "]


def test_a_cell_cannot_break_its_table():
    assert table(["a", "b"], [["x | y", "1\n2"]]).splitlines()[-1] == r"| x \| y | 1 2 |"
    with pytest.raises(ValueError, match="1 cells under a header of 2"):
        table(["a", "b"], [["x"]])
    assert block([("a", "x\n```\ny"), ("b", "")]) == "```\na             x ``` y\n```"
    assert signed_percent(-0.0001) == "+0.0%"


def test_files_that_cannot_be_used_are_one_sentence(folder, tmp_path, capsys):
    missing = tmp_path / "none"
    assert main(["--results", str(missing)]) == 2
    assert "is no folder of results" in capsys.readouterr().err
    assert main(["--results", str(folder), "--page", str(missing / "page.md")]) == 2
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff")
    assert main(["--results", str(folder), "--page", str(page), "--check"]) == 2
    assert capsys.readouterr().err.count("bench.report: ") == 2


def test_a_section_is_not_checked_alone(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["published", "--check"])
    assert "--check is of the whole page" in capsys.readouterr().err
