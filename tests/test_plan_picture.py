"""The picture of plans: the figures it shows, names that stand apart, and when there is none."""

import argparse
import sys
from itertools import combinations
from pathlib import Path

import pytest

from fastbrain.commands import plan as command
from fastbrain.commands import plan_picture
from fastbrain.commands.plan_asked import Planned, planned
from fastbrain.training.command import parse

GIB = 2**30


def asked(*words: str) -> list[Planned]:
    return planned(options(*words))


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parse(parser, words)


@pytest.fixture
def drawn():
    pytest.importorskip("matplotlib")
    return lambda *words: plan_picture.figure(asked(*words))


def boxes(artists, figure):
    """Where artists stand, in pixels; of an annotation its words alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    extent = [
        Text.get_window_extent if isinstance(e, Text) else type(e).get_window_extent
        for e in artists
    ]
    return [get(artist, canvas.get_renderer()) for get, artist in zip(extent, artists, strict=True)]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_file_is_what_its_suffix_says(tmp_path, capsys, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"shapes.{kind.upper()}"
    assert command.run(options("30m", "124m", "--picture", str(path))) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 shapes on RTX 3060 12 GB\n")
    assert err == f"drawn: {path}\n"
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert path.read_bytes().startswith(start)
    assert b"<svg" in path.read_bytes() or kind == "png"


def test_it_says_that_it_is_predicted_and_in_which_units(drawn):
    figure = drawn("300m-moe-12gb", "124m")
    speed, memory = figure.axes
    assert figure.get_suptitle() == (
        "Predicted: 2 shapes on RTX 3060 12 GB, micro-batch 8 x 1,024 tokens"
    )
    assert (speed.get_xlabel(), speed.get_ylabel()) == (
        "active parameters, millions", "predicted tokens/s",
    )  # fmt: skip
    assert memory.get_xlabel() == "predicted memory of a step, GiB"
    # where micro-batches differ, each is at its bar
    figure = drawn("30m", "124m")
    assert figure.get_suptitle() == "Predicted: 2 shapes on RTX 3060 12 GB"
    memory = figure.axes[1]
    assert [each.get_text() for each in memory.get_yticklabels()] == [
        "30m, 8 x 512\n2.1 of 12 GiB", "124m, 8 x 1,024\n6.1 of 12 GiB",
    ]  # fmt: skip


def test_points_are_speed_against_active_parameters(drawn):
    found = asked("300m-moe-12gb", "124m", "30m", "--batch", "32")
    speed = drawn("300m-moe-12gb", "124m", "30m", "--batch", "32").axes[0]
    fits, not_fits = (points.get_offsets().tolist() for points in speed.collections)
    places = [[e.plan.counts.active / 1e6, e.plan.tokens_per_s] for e in found]
    assert (not_fits, fits) == (places[:2], places[2:])
    assert [each.get_text() for each in speed.get_legend().get_texts()] == ["fits", "does not fit"]
    for each, note in zip(found, speed.texts, strict=True):
        assert note.get_text() == f"{each.label}\n{each.plan.tokens_per_s:,.0f}"
        assert note.xy == (each.plan.counts.active / 1e6, each.plan.tokens_per_s)


def test_bars_add_up_to_what_is_needed(drawn):
    found = asked("300m-moe-12gb", "30m", "--no-mixed-precision")
    memory = drawn("300m-moe-12gb", "30m", "--no-mixed-precision").axes[1]
    assert memory.yaxis_inverted()
    for at, each in enumerate(found):
        parts = {bars.get_label(): bars.patches[at].get_width() for bars in memory.containers}
        ends = [
            bars.patches[at].get_x() + bars.patches[at].get_width() for bars in memory.containers
        ]
        assert sum(parts.values()) * GIB == pytest.approx(each.plan.memory.needed_bytes)
        assert max(ends) == pytest.approx(sum(parts.values()))
        for name, size in each.plan.memory.parts.items():
            assert parts[name] * GIB == pytest.approx(size), name


@pytest.mark.parametrize(
    ("words", "at", "name"),
    [
        (["30m"], 12, "memory of the card"),
        (["30m", "--budget-mib", "4096"], 4, "budget"),
        (["30m", "--budget-mib", "40960"], 12, "memory of the card"),
        (["300m-moe-12gb", "--batch", "32"], 12, "memory of the card"),
    ],
)
def test_the_cards_memory_is_a_line(drawn, words, at, name):
    memory = drawn(*words).axes[1]
    assert {float(x) for drawn in memory.lines for x in drawn.get_xdata()} == {at}
    assert memory.get_xlim()[1] > at
    assert name in [each.get_text() for each in memory.get_legend().get_texts()]


def test_a_card_far_larger_than_its_bar_is_a_mark_at_the_edge(drawn):
    memory = drawn("30m", "--card", "all").axes[1]
    edge = memory.get_xlim()[1]
    lines = {round(float(x), 3) for drawn in memory.lines for x in drawn.get_xdata()}
    assert lines == {12, 16, round(edge, 3)}
    names = [each.get_text() for each in memory.get_legend().get_texts()]
    assert names[-2:] == ["memory of the card", "memory of the card, farther right"]
    assert [each.get_text().split("\n")[1] for each in memory.get_yticklabels()][-1].endswith(
        " of 141 GiB"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--compare"],
        ["--compare", "--batch", "32"],
        ["124m", "--card", "all"],
        ["tiny-cpu", "--card", "all"],
        [],
    ],
    ids=" ".join,
)
def test_names_stand_apart_and_inside(drawn, words):
    figure = drawn(*words)
    speed, memory = figure.axes
    bars = memory.get_yticklabels()
    panel, legend, label, *texts = boxes(
        [speed, memory.get_legend(), memory.xaxis.label, *speed.texts, *bars], figure
    )
    notes, names = texts[: len(bars)], texts[len(bars) :]
    assert not any(one.overlaps(other) for one, other in combinations(notes, 2))
    assert not any(one.overlaps(other) for one, other in combinations(names, 2))
    assert not any(name.overlaps(panel) for name in names)
    for note in notes:
        assert panel.x0 <= note.x0 < note.x1 <= panel.x1
        assert panel.y0 <= note.y0 < note.y1 <= panel.y1
    # the legend clears the name of the axis, and nothing leaves the picture
    assert 0 < legend.y0 < legend.y1 < label.y0
    assert 0 < legend.x0 < legend.x1 < figure.bbox.width


def test_names_of_points_close_together_stand_apart():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from fastbrain.commands.plan_labels import name_points

    figure = Figure(figsize=(6, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 100), ylim=(0, 100))
    places = [(50.0, 50.0), (50.0, 52.0), (55.0, 51.0), (99.0, 99.0), (1.0, 1.0)]
    notes = name_points(axes, places, [f"a long name {at}\n12,345" for at in range(5)])
    for one, other in combinations(boxes(notes, figure), 2):
        assert not one.overlaps(other)


def test_every_component_has_a_color_of_its_own():
    parts = {
        name
        for words in (["300m-moe-12gb"], ["300m-moe-12gb", "--batch", "64"], ["30m"])
        for each in asked(*words)
        for name in each.plan.memory.parts
    }
    colors = plan_picture._COLORS
    assert parts < set(colors)
    assert len(set(colors.values())) == len(colors)


def test_without_matplotlib_there_is_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plan_picture, "find_spec", lambda name: None)
    path = tmp_path / "shapes.png"
    assert command.run(options("30m", "--picture", str(path))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "fastbrain: --picture needs matplotlib, which is missing: pip install 'fastbrain[plot]'\n"
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shapes.pdf", "--picture must end in .png or .svg, got 'shapes.pdf'"),
        ("shapes", "--picture must end in .png or .svg, got 'shapes'"),
        ("nowhere/shapes.png", "cannot write {here}/nowhere/shapes.png: No such file or directory"),
    ],
)
def test_a_picture_that_cannot_be_is_refused(monkeypatch, tmp_path, capsys, name, said):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert command.run(options("30m", "--picture", name)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fastbrain: " + said.format(here=tmp_path))
    assert not list(Path().iterdir())
