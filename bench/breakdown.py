"""Where the time of a training step goes, from PyTorch's profiler.

The time of an operator is its self time on the calling thread, so the groups add up to the step:

    optimizer        everything between the calls that clear gradients, clip and update
    attention        inside an operator named after scaled dot product attention
    head             inside an operator or autograd node named after cross-entropy, and whatever
                     has the vocabulary among its dimensions, embedding look-ups apart: that is the
                     head's matrix products, its loss, and the gradient sum of a tied embedding
    matrix products  the remaining matrix products: projections, feed-forward, experts, router
    rest             norms, rotation, activation, routing, copies, Python between operators

A vocabulary that is also another dimension of the model would blur the head.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.contenders import OPTIMIZER_RANGE, Contender

GROUPS = ("matrix products", "attention", "head", "optimizer", "rest")

_STEP = "bench::step"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm")


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step by group, and by (group, operator)."""

    groups: Counter[str] = field(default_factory=Counter)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)


def profile(contender: Contender, batches: Iterable[Tensor], vocab_size: int) -> Breakdown:
    """Run a step on each batch (B, S) under the profiler; the mean step's breakdown."""
    steps = 0
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for ids in batches:
            steps += 1
            with torch.profiler.record_function(_STEP):
                contender.step(ids)
    result = Breakdown()
    for event in profiler.events() or ():
        path = list(_ancestry(event))
        if path[-1].name != _STEP:
            continue
        ms = event.self_cpu_time_total / 1e3 / steps
        group = _group(path, vocab_size)
        result.groups[group] += ms
        name = "(Python between operators)" if event.name == _STEP else event.name
        result.operators[group, name] += ms
    return result


def table(columns: dict[str, Breakdown], largest: int = 10) -> str:
    """The breakdowns side by side, then the largest operators of each."""
    width = max(len(label) for label in columns)
    lines = [" " * 16 + "".join(f"  {label:>{max(width, 16)}}" for label in columns)]
    for group in [*GROUPS, "total"]:
        row = f"{group:16}"
        for result in columns.values():
            total = result.groups.total()
            ms = total if group == "total" else result.groups[group]
            row += f"  {ms:{max(width, 16) - 10}.1f} ms {ms / total:5.1%}"
        lines.append(row)
    for label, result in columns.items():
        total = result.groups.total()
        lines += ["", f"largest operators of {label}, self time"]
        for (group, name), ms in result.operators.most_common(largest):
            lines.append(f"  {ms:8.1f} ms {ms / total:5.1%}  {group:15}  {name}")
    return "\n".join(lines)


def _ancestry(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _group(path: list[Any], vocab_size: int) -> str:
    names = [event.name for event in path]
    if OPTIMIZER_RANGE in names:
        return "optimizer"
    if any("scaled_dot_product" in name or "flash_attention" in name for name in names):
        return "attention"
    looked_up = any("embedding" in name.lower() for name in names)
    if any("crossentropy" in name.lower().replace("_", "") for name in names) or (
        not looked_up and any(vocab_size in shape for shape in _shapes(path[0]))
    ):
        return "head"
    if path[0].name.removeprefix("aten::") in _PRODUCTS:
        return "matrix products"
    return "rest"


def _shapes(event: Any) -> Iterator[list[int]]:
    """The shapes of an operator's tensor inputs, those in a list of tensors included."""
    for shape in event.input_shapes or ():
        if shape and isinstance(shape[0], list):
            yield from shape
        elif isinstance(shape, list):
            yield shape
