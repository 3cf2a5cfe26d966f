"""Charts: no extreme is lost, no size grows with the run, and axes with numbers one can read."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fastbrain.training.report.axes import Axis, from_zero, spanning, written
from fastbrain.training.report.curves import COLUMNS, Chart, Mark, Span, thinned

X = Axis(1, 1000)


def chart(**given) -> str:
    curve = thinned(np.arange(1.0, 1001), np.linspace(9, 2, 1000))
    return Chart(
        **{"name": "Loss", "unit": "", "x": X, "y": Axis(0, 10), "curve": curve} | given
    ).html()


def drawing(html: str) -> ElementTree.Element:
    """The SVG of a chart; anything that is not well-formed is an error."""
    return ElementTree.fromstring(html[html.index("<svg") : html.rindex("</svg>") + 6])


def places(html: str, kind: str) -> list[tuple[float, float]]:
    path = re.search(rf'class="{kind}" d="M([^"]*)"', html)[1]
    return [tuple(map(float, each.split())) for each in path.split("L")]


def test_a_curve_keeps_the_extremes_of_half_a_million_steps():
    y = np.full(500_000, 3.0)
    y[123_456], y[400_000] = 77, -5
    found = thinned(np.arange(1.0, 500_001), y)
    assert len(found.x) == COLUMNS
    assert found.high.max() == 77
    assert found.low.min() == -5
    assert (found.middle == 3).all()
    at = int(found.high.argmax())
    assert abs(found.x[at] - 123_457) <= 500_000 / COLUMNS


def test_a_short_curve_is_itself():
    x, y = np.array([1.0, 2, 3, 5]), np.array([4.0, 3, 9, 1])
    found = thinned(x, y)
    for each in (found.low, found.high, found.middle):
        assert each.tolist() == y.tolist()
    assert found.x.tolist() == x.tolist()
    assert not found.differs


def test_medians_follow_the_steep_beginning_and_not_the_spikes():
    x = np.arange(1.0, 20_001)
    y = 3 + 7 * np.exp(-x / 100)
    y[::97] += 50
    found = thinned(x, y)
    true = 3 + 7 * np.exp(-found.x / 100)
    assert found.middle[0] > 9
    assert np.abs(found.middle - true).max() < 0.2


def test_what_is_not_finite_is_left_out():
    y = np.array([math.nan, 2, math.inf, 4])
    assert thinned(np.arange(4.0), y).x.tolist() == [1, 3]
    assert not len(thinned(np.arange(4.0), np.full(4, math.nan)).x)
    assert not len(thinned(np.array([]), np.array([])).x)


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis(1, 6), [1, 2, 3, 4, 5, 6]),
        (Axis(2.9, 11, True), [4, 6, 8, 10]),
        (Axis(0.03, 40, True), [0.1, 1, 10]),
        (Axis(-0.3, 0.3), [-0.2, 0, 0.2]),
        (Axis(1, 500_000), [100_000, 200_000, 300_000, 400_000, 500_000]),
    ],
)
def test_ticks_are_round_and_inside(axis, ticks):
    most = len(ticks) if len(ticks) > 4 else 4
    assert axis.ticks(most) == ticks
    assert all(-1e-9 <= axis.place(each) <= 1 + 1e-9 for each in ticks)


def test_a_wide_range_is_logarithmic_and_a_spike_does_not_make_one():
    values = np.linspace(3, 4, 10_000)
    assert not spanning(values, []).logarithmic
    values[5000] = 1e6
    axis = spanning(values, [])
    assert not axis.logarithmic
    assert axis.high < 5
    assert spanning(np.geomspace(0.1, 100, 1000), []).logarithmic
    assert not spanning(np.linspace(-1, 100, 1000), []).logarithmic


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [-3.0], [1e-30, 1e30], [2.0, 2.0]])
def test_every_axis_has_two_ends(values):
    for axis in (spanning(np.array(values), []), from_zero(np.array(values))):
        assert axis.low < axis.high
        assert len(axis.ticks()) <= 6
        assert all(map(math.isfinite, axis.ticks()))
        assert all(0 <= axis.place(each) <= 1 for each in values if axis.place(each) > -1)


def test_must_values_are_inside():
    axis = spanning(np.linspace(3, 4, 1000), [2.5, 4.4])
    assert axis.low < 2.5
    assert axis.high > 4.4


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.0006, "0.0006"), (2500, "2.5k"), (1e6, "1M"), (-2000, "-2k"), (3e9, "3G")],
)
def test_numbers_beside_an_axis_are_short(value, said):
    assert written(value) == said


def test_a_line_lies_where_its_numbers_are():
    x, y = np.array([0.0, 50, 100]), np.array([0.0, 10, 5])
    html = chart(x=Axis(0, 100), y=Axis(0, 10), curve=thinned(x, y))
    assert places(html, "smooth") == [(0, 1000), (500, 0), (1000, 500)]


def test_marks_outside_stand_at_the_edge():
    html = chart(marks=[Mark(500, 99, "spike", "up"), Mark(500, -99, "skip", "down")])
    drawn = {
        each.get("class"): each for each in drawing(html).iter() if "mark" in each.get("class", "")
    }
    assert drawn["mark spike"].get("d").endswith(" 0.0h.1")
    assert drawn["mark skip"].get("d").endswith(" 1000.0h.1")


def test_a_stretch_has_a_width_and_a_place_none():
    html = chart(spans=[Span(100, 400, "rollback", "back"), Span(600, 600, "start", "again")])
    root = drawing(html)
    rectangle = next(
        each
        for each in root.iter()
        if each.tag == "{http://www.w3.org/2000/svg}rect" or each.tag == "rect"
    )
    assert float(rectangle.get("width")) == pytest.approx(300.3, abs=0.1)
    assert any(each.get("class") == "start" for each in root.iter())


def test_titles_are_escaped():
    html = chart(marks=[Mark(5, 5, "spike", "<script>&\x00")], name="A<b>")
    drawing(html)
    assert "<script>&" not in html
    assert "A<b>" not in html


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_steps_make_a_chart(count):
    curve = thinned(np.arange(1.0, count + 1), np.full(count, 3.0))
    html = chart(curve=curve, points=[(1.0, 3.0)] * count)
    drawing(html)
    assert "nan" not in html
    assert ('class="smooth"' in html) == (count > 0)
    # a line to one point is none: it ends where it begins
    assert not count or len(places(html, "smooth")) == 2


def test_a_chart_of_a_week_is_small():
    y = 3 + np.random.default_rng(0).normal(size=500_000) / 10
    assert len(chart(curve=thinned(np.arange(1.0, 500_001), y))) < 100_000
