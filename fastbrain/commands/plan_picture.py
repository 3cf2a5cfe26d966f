"""Plans as a picture: speed against active parameters, and memory by component."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbrain import atomic
from fastbrain.commands.plan_asked import Planned
from fastbrain.commands.plan_labels import name_points
from fastbrain.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which the color-blind tell apart
_COLORS = {
    "weights": "#0072B2",
    "shadow weights": "#56B4E9",
    "moments": "#009E73",
    "gradients": "#F0E442",
    "gathered weights": "#882255",
    "unsharded gradients": "#DDCC77",
    "activations": "#E69F00",
    "layer in backward": "#D55E00",
    "head": "#CC79A7",
    "workspace": "#999999",
    "the process itself": "#666666",
    "driver and kernels": "#CCCCCC",
}
_LINE: dict[str, Any] = {"color": "black", "linewidth": 2, "solid_capstyle": "butt", "zorder": 3}
_GIB = 2**30
# a card with more than so many times the tallest bar would flatten the bars
_TALLEST = 8


def check(path: Path) -> None:
    """Find out early that there can be no picture.

    Raises:
        InvalidConfig: matplotlib is missing, or the name is not that of a picture.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise InvalidConfig(f"--picture must end in .png or .svg, got {str(path)!r}")
    if find_spec("matplotlib") is None:
        raise InvalidConfig(
            "--picture needs matplotlib, which is missing: pip install 'fastbrain[plot]'"
        )


def draw(found: list[Planned], path: Path) -> None:
    """Draw plans into a file, its kind by its suffix.

    Raises:
        Io: the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    with atomic.replacing(path) as file:
        figure(found).savefig(file, format=kind)


def figure(found: list[Planned]) -> "Figure":
    """The two panels."""
    # Figure alone, without pyplot: no global state, no window, no display needed
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = max(5.0, 2.6 + 0.6 * len(found))
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    result = Figure(figsize=(13, height), dpi=120, layout=layout)
    speed, memory = result.subplots(1, 2, width_ratios=(1, 1.1))
    result.suptitle(_title(found), fontsize=13)
    # both legends hang below their panels, clear of the axis's name
    below: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (0.45, -0.42 / (height - 1.85)),
    }
    below |= {"frameon": False, "fontsize": 9}
    _speed(speed, found, below)
    _memory(memory, found, below)
    names = [f"{each.label}\n{each.plan.tokens_per_s:,.0f}" for each in found]
    name_points(speed, [(_millions(e), e.plan.tokens_per_s) for e in found], names)
    return result


def _millions(found: Planned) -> float:
    return found.plan.counts.active / 1e6


def _title(found: list[Planned]) -> str:
    cards = {each.plan.card.name for each in found}
    names = {each.shape.name for each in found}
    what = names.pop() if len(names) == 1 else f"{len(names)} shapes"
    where = cards.pop() if len(cards) == 1 else f"{len(cards)} cards"
    steps = _steps(found)
    step = "" if len(set(steps)) > 1 else f", micro-batch {steps[0]} tokens"
    ranks = found[0].plan.ranks
    many = f"{ranks:,} x " if ranks > 1 else ""
    return f"Predicted: {what} on {many}{where}{step}"


def _speed(axes: "Axes", found: list[Planned], legend: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for fits, face in ((True, _COLORS["weights"]), (False, "white")):
        points = [each for each in found if each.fits is fits]
        if points:
            axes.scatter(
                [_millions(each) for each in points],
                [each.plan.tokens_per_s for each in points],
                s=70,
                facecolor=face,
                edgecolor=_COLORS["weights" if fits else "layer in backward"],
                linewidth=1.8,
                zorder=3,
                label="fits" if fits else "does not fit",
            )
    for axis, values, set_scale, set_limits in (
        (axes.xaxis, [_millions(e) for e in found], axes.set_xscale, axes.set_xlim),
        (axes.yaxis, [e.plan.tokens_per_s for e in found], axes.set_yscale, axes.set_ylim),
    ):
        low, high = min(values), max(values)
        if high > 8 * low:
            set_scale("log")
            set_limits(low / 1.8, high * 1.8)
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
        else:
            set_limits(0, high * 1.25)
            axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel("active parameters, millions")
    several = found[0].plan.ranks > 1
    axes.set_ylabel(f"predicted tokens/s{' of all ranks' if several else ''}")
    axes.set_title("Speed", loc="left")
    axes.grid(alpha=0.3)
    if not all(each.fits for each in found):
        axes.legend(ncols=2, **legend)


def _memory(axes: "Axes", found: list[Planned], legend: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D

    tallest = max(each.plan.memory.needed_bytes for each in found) / _GIB
    limits = [each.limit_bytes / _GIB for each in found]
    edge = 1.06 * max(tallest, *(limit for limit in limits if limit <= _TALLEST * tallest), 0.0)
    ends = [0.0] * len(found)
    for name, color in _COLORS.items():
        sizes = [_component(each, name) / _GIB for each in found]
        if any(sizes):
            axes.barh(
                range(len(found)), sizes, left=ends, height=0.62, color=color, label=name,
                edgecolor="white", linewidth=0.5, zorder=2,
            )  # fmt: skip
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    handles, names = axes.get_legend_handles_labels()
    kind = "budget" if found[0].limit_bytes == found[0].budget_bytes else "memory of the card"
    near = {at: limit for at, limit in enumerate(limits) if 0 < limit <= edge}
    beyond = [at for at, limit in enumerate(limits) if limit > edge]
    for at, limit in near.items():
        axes.plot([limit, limit], [at - 0.5, at + 0.5], **_LINE)
    if len(near) == len(found) and len(set(limits)) == 1:
        axes.axvline(limits[0], **_LINE)
    if near:
        handles.append(Line2D([], [], **_LINE))
        names.append(kind)
    if beyond:
        mark: dict[str, Any] = {"color": _LINE["color"], "marker": ">", "linestyle": ""}
        axes.plot([edge] * len(beyond), beyond, clip_on=False, zorder=3, **mark)
        handles.append(Line2D([], [], **mark))
        names.append(f"{kind}, farther right")
    axes.set_xlim(0, edge)
    # few bars stay as thin as many
    room = max(0.0, (3 - len(found)) / 2)
    axes.set_ylim(len(found) - 0.5 + room, -0.5 - room)
    steps = _steps(found) if len(set(_steps(found))) > 1 else [""] * len(found)
    labels = [_bar_label(each, step) for each, step in zip(found, steps, strict=True)]
    axes.set_yticks(range(len(found)), labels)
    whose = " of each rank" if found[0].plan.ranks > 1 else ""
    axes.set_xlabel(f"predicted memory of a step{whose}, GiB")
    axes.set_title("Memory", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(handles, names, ncols=4, **legend)


def _component(each: Planned, name: str) -> int:
    memory = each.plan.memory
    return memory.outside_bytes if name == "driver and kernels" else memory.parts.get(name, 0)


def _bar_label(each: Planned, step: str) -> str:
    kind = f", {each.plan.parallel}" if each.plan.parallel else ""
    name = f"{each.label}{kind}, {step}" if step else f"{each.label}{kind}"
    need = f"{each.plan.memory.needed_bytes / _GIB:.1f}"
    if not each.limit_bytes:
        return f"{name}\n{need} GiB"
    too_large = "" if each.fits else ", too large"
    return f"{name}\n{need} of {each.limit_bytes / _GIB:.3g} GiB{too_large}"


def _steps(found: list[Planned]) -> list[str]:
    """The micro-batch of each plan, with its operands where they are not all the same."""
    mixed = len({each.plan.mixed_precision for each in found}) > 1
    operands = {True: " BF16", False: " FP32"} if mixed else {True: "", False: ""}
    return [
        f"{each.plan.batch} x {each.plan.seq:,}{operands[each.plan.mixed_precision]}"
        for each in found
    ]
