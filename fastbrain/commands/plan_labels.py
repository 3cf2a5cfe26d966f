"""Names beside the points of a picture, none over another."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS: dict[str, Any] = {"fontsize": 9, "textcoords": "offset points", "zorder": 4}
_LEADER = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
# which way from its point a name may stand, and which of its sides is nearest then
_WAYS = (
    (1.0, 0.0, "left", "center"),
    (-1.0, 0.0, "right", "center"),
    (0.0, 1.0, "center", "bottom"),
    (0.0, -1.0, "center", "top"),
    (0.8, 0.8, "left", "bottom"),
    (0.8, -0.8, "left", "top"),
    (-0.8, 0.8, "right", "bottom"),
    (-0.8, -0.8, "right", "top"),
)
# how far, in points; from the second on a line leads there
_NEAR = 9
_FAR = (_NEAR, 26, 44, 62)
_SIDES = tuple((x * far, y * far, *ends, far) for far in _FAR for x, y, *ends in _WAYS)
_MARK = 9.0  # pixels that a point reaches to each side


def name_points(
    axes: "Axes", places: Sequence[tuple[float, float]], names: Sequence[str]
) -> list[Any]:
    """Write names where they cover as little as can be of points, legend and other names.

    Args:
        axes: with its limits and its legend in place; the figure is drawn to lay it out.
        places: of the points, in the units of the axes.
        names: of the points.

    Returns:
        The annotations.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure: Any = axes.figure
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    panel = axes.get_window_extent(renderer)
    taken = [
        Bbox.from_extents(x - _MARK, y - _MARK, x + _MARK, y + _MARK)
        for x, y in axes.transData.transform(list(places))
    ]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))

    def written(name: str, place: tuple[float, float], side: tuple[Any, ...]) -> Any:
        x, y, horizontal, vertical, far = side
        leader = None if far == _NEAR else _LEADER
        note = axes.annotate(
            name, place, (x, y), ha=horizontal, va=vertical, arrowprops=leader, **_POINTS
        )
        # it is put where there is room, and must not move what it was fitted to
        note.set_in_layout(False)
        return note

    def words(note: Any) -> Any:
        """Where the words are, without the line that leads to them."""
        note.update_positions(renderer)
        return Text.get_window_extent(note, renderer)

    def covered(note: Any) -> float:
        box = words(note)
        outside = box.width * box.height - _shared(box, panel)
        return float(outside + sum(_shared(box, other) for other in taken))

    notes = []
    for name, place in zip(names, places, strict=True):
        found = []
        for side in _SIDES:
            note = written(name, place, side)
            found.append(covered(note))
            note.remove()
            if not found[-1]:
                break
        note = written(name, place, _SIDES[found.index(min(found))])
        taken.append(words(note))
        notes.append(note)
    return notes


def _shared(one: Any, other: Any) -> float:
    """The area, in square pixels, that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))
