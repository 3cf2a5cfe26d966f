"""The figures and sentences of a plan, as a reader wants them."""

import pytest

from fastbrain.commands.plan_words import about, aspect_advice, duration
from fastbrain.config import TransformerConfig


@pytest.mark.parametrize(
    ("d_model", "n_layers", "said"),
    [
        (1024, 20, "inside the working range of 50 to 100"),
        (500, 10, "inside the working range of 50 to 100"),
        (1000, 10, "inside the working range of 50 to 100"),
        (128, 3, "too deep and narrow for the working range of 50 to 100: take at this width 2 "
         "layers, or at this depth a d_model of 150 to 300"),
        (768, 16, "too deep and narrow for the working range of 50 to 100: take at this width 8 to "
         "15 layers, or at this depth a d_model of 800 to 1,600"),
        (1002, 10, "too wide and shallow for the working range of 50 to 100: take at this width "
         "11 to 20 layers, or at this depth a d_model of 500 to 1,000"),
        (32, 1, "too deep and narrow for the working range of 50 to 100: take at this depth a "
         "d_model of 50 to 100"),
    ],
)  # fmt: skip
def test_the_aspect_ratio_comes_with_the_chapters_advice(d_model, n_layers, said):
    config = TransformerConfig(d_model=d_model, n_layers=n_layers, moe_layers=())
    assert aspect_advice(config) == said


def test_figures_come_in_units_that_read():
    assert [duration(days) for days in (25.24, 2, 1.99, 1 / 12, 0.08, 1 / 86_400)] == [
        "25.2 days", "2.0 days", "47.8 hours", "2.0 hours", "115.2 minutes", "1.0 seconds",
    ]  # fmt: skip
    assert [about(count) for count in (7, 999, 713_956_352, 3_987_886_080, 50 * 10**9)] == [
        "7", "999", "714M", "3.99B", "50B",
    ]  # fmt: skip
