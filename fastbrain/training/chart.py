"""The picture of a run: training loss of every step and held-out loss, where matplotlib is."""

from importlib.util import find_spec
from pathlib import Path

from fastbrain import atomic
from fastbrain.training import metrics


def draw(rows: list[metrics.Row], path: Path, title: str) -> str | None:
    """Draw the loss curves of a merged history as a PNG.

    Returns None, or one sentence saying why there is no picture.
    """
    if find_spec("matplotlib") is None:
        return f"{path.name} is not drawn: matplotlib is missing (pip install fastbrain[plot])"
    steps = [row for row in rows if row.get("loss") is not None]
    scores = [row for row in rows if row.get("val_loss") is not None]
    if len(steps) < 2:
        return f"{path.name} is not drawn: there are fewer than two steps to draw"

    # Figure alone, without pyplot: no global state, no window, no display needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [row["step"] for row in steps],
        [row["loss"] for row in steps],
        color="tab:blue",
        linewidth=0.6,
        alpha=0.8,
        label=f"training, each step ({steps[-1]['loss']:.3f} at the end)",
    )
    if scores:
        axes.plot(
            [row["step"] for row in scores],
            [row["val_loss"] for row in scores],
            color="tab:red",
            linewidth=1.2,
            marker="o",
            markersize=4,
            label=f"held-out ({scores[-1]['val_loss']:.3f} at the end)",
        )
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.margins(x=0.01)
    with atomic.replacing(path) as file:
        # Agg wants no seeking for a PNG
        figure.savefig(file, format="png")
    return None
