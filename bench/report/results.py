"""Result files: what a benchmark wrote of one machine, read and checked."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbrain.config import TransformerConfig

# which key of a file's "machine" names what was timed; the first that is there does
_DEVICE = ("card", "gpu", "device", "cpu")
_FIRST = ("command", "date", "commit", *_DEVICE, "driver", "torch", "triton")

# sizes that show that a benchmark runs, and are never quoted
_TOYS = ("--smoke", "--dry")


class BadResult(Exception):
    """A result file cannot be used; the message names the file and the way out."""


@dataclass(frozen=True)
class Result:
    """One file of `bench/results/`.

    Attributes:
        name: of the file.
        kind: what was run, such as "training step".
        machine: where and with what, in the file's words.
        body: the rest of the file.
    """

    name: str
    kind: str
    machine: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def device(self) -> str:
        """The card or CPU that was timed, by its name alone."""
        found = next(self.machine[key] for key in _DEVICE if key in self.machine)
        # a CPU's name is followed by its threads and instructions
        return found.partition(", ")[0]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What stands above a table: the command first, then the machine as the file has it."""
        order = {key: place for place, key in enumerate(_FIRST)}
        keys = sorted(self.machine, key=lambda key: order.get(key, len(order)))
        return [*((key, self.machine[key]) for key in keys), ("file", f"bench/results/{self.name}")]


@dataclass(frozen=True)
class MeasuredStep:
    """The speed and memory of one training step of fastbrain.

    Attributes:
        device: the card or CPU.
        peak_bytes: the allocator's high-water mark on a card; None where it is unknown.
    """

    device: str
    config: TransformerConfig
    batch: int
    seq: int
    tokens_per_s: float
    peak_bytes: float | None


def _own_machine(body: Mapping[str, Any]) -> dict[str, Any]:
    found = body.get("machine")
    return dict(found) if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Kind:
    """What the page does with a kind of result.

    Attributes:
        render: its tables.
        title: what they show.
        machine: where and with what a file's figures were taken; its "machine" by default.
        steps: the training steps in it.
    """

    render: Callable[[Result], str]
    title: str = "(MEASURED)"
    machine: Callable[[Mapping[str, Any]], dict[str, Any]] = _own_machine
    steps: Callable[[Result], list[MeasuredStep]] = lambda _: []


Kinds = Mapping[str, Kind]


def load(folder: Path, kinds: Kinds) -> list[Result]:
    """Every JSON file of a folder, by name.

    Raises:
        BadResult: a file is not JSON, is of none of `kinds`, does not say what made it and where,
            or is of a toy size.
    """
    if not folder.is_dir():
        raise BadResult(f"{folder} is no folder of results: give one with --results")
    return [_read(path, kinds) for path in sorted(folder.glob("*.json"))]


def render(result: Result, kinds: Kinds) -> str:
    """The tables of a result.

    Raises:
        BadResult: it lacks what its kind's tables show.
    """
    with _layout(result.name, result.kind):
        return kinds[result.kind].render(result)


def steps(result: Result, kinds: Kinds) -> list[MeasuredStep]:
    """The training steps of a result.

    Raises:
        BadResult: it is not laid out like its kind.
    """
    with _layout(result.name, result.kind):
        return kinds[result.kind].steps(result)


@contextmanager
def _layout(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadResult(
            f"{name} says that it is of kind {kind!r} but is not laid out like one "
            f"({type(error).__name__}: {error}): write it again with a benchmark of this version"
        ) from error


def _read(path: Path, kinds: Kinds) -> Result:
    try:
        body = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadResult(
            f"{path.name} is not valid JSON ({error}): write it again or remove it"
        ) from error
    if not isinstance(body, dict) or body.get("kind") not in kinds:
        kind = body.get("kind") if isinstance(body, dict) else None
        raise BadResult(
            f"{path.name} is of kind {kind!r}, which is none of those that have a table: "
            f"{', '.join(kinds)}; remove it, or write it with a benchmark of this version"
        )
    machine = _machine(path.name, body, kinds)
    toy = [flag for flag in _TOYS if flag in machine["command"].split()]
    if toy:
        raise BadResult(
            f"{path.name} was written by `{machine['command']}`, and {toy[0]} runs toy sizes whose "
            "times are not quoted: remove it, or run it without"
        )
    return Result(path.name, body["kind"], machine, body)


def _machine(name: str, body: Mapping[str, Any], kinds: Kinds) -> dict[str, str]:
    with _layout(name, body["kind"]):
        found = kinds[body["kind"]].machine(body)
    machine = {str(k): str(v) for k, v in found.items() if v not in (None, "", "none", "None")}
    for key in ("command", "commit", "date"):
        if key not in machine and isinstance(body.get(key), str):
            machine[key] = body[key]
    wanted = [key for key in ("command", "commit", "date", "torch") if not machine.get(key)]
    if not any(machine.get(key) for key in _DEVICE):
        wanted.append(" or ".join(_DEVICE))
    if wanted:
        raise BadResult(
            f'{name} does not say its {", ".join(wanted)} under "machine", and no figure stands '
            "here without: write it again with a benchmark of this version"
        )
    return machine


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a number")
