"""The command line of one measurement: what is asked for, measured, said, and the exit code."""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastbrain.errors import FastBrainError
from fastbrain.sweep_arch.arguments import add_flags, add_shape
from fastbrain.sweep_arch.request import Request, request_of

if TYPE_CHECKING:
    from fastbrain.sweep_arch.measure import Measurement
    from fastbrain.sweep_arch.place import Place
    from fastbrain.sweep_arch.watch import Watch

DONE, FAILED, REFUSED = 0, 1, 2
# what a shell says of a program that Ctrl-C ended
INTERRUPTED = 130

_EPILOG = """example:
  python -m fastbrain.sweep_arch 32000 1024 20 8 512 1 8 2
  python -m fastbrain.sweep_arch 32000 1024 20 8 512 1 8 2 --moe-d-ff 512 --moe-start 5
  python -m fastbrain.sweep_arch 32000 1024 20 8 512 1 8 2 --ranks 2 --link ethernet10
  python -m fastbrain.sweep_arch --table shapes.txt

Widths that are not given follow from d_model, those of the reference system. With --table, flags
of the command hold for every row that does not say otherwise.
Exit codes: 0 measured, 1 out of memory or failed, 2 refused."""

Measure = Callable[[Request, "Place", "Watch | None"], "Measurement"]


def main(arguments: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """Run this command with these arguments, those of the process by default.

    Args:
        arguments: the words of the command line.
        measure: takes the measurement; `fastbrain.sweep_arch.measure.measure` unless given.

    Returns:
        The exit code: 0 measured, 1 out of memory or failed, 2 refused, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # taken out first: a row of a table has all the other words, and never this one
        found, rest = _table_parser().parse_known_args(words)
        if found.table is not None:
            return _many(found.table, rest)
        return _one(request_of(_parser().parse_intermixed_args(words)), words, measure)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _one(request: Request, words: list[str], measure: Measure | None) -> int:
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        print(f"fastbrain: warning: {text}", file=sys.stderr)

    for note in request.notes:
        warn(note)
    with _python_warnings(warn):
        # they bring torch, which takes a second: what can be refused without it has been
        from fastbrain.sweep_arch import document, out_of_memory, prediction, ranks
        from fastbrain.sweep_arch import measure as training
        from fastbrain.sweep_arch.line import line
        from fastbrain.sweep_arch.place import Place
        from fastbrain.sweep_arch.watch import Watch

        watch = None if request.device == "cpu" else Watch()
        place = Place.find(request.device)
        if watch is not None:
            watch.attach(place.uuid)
        watch = watch if place.is_cuda else None
        planned = prediction.planned(request, place)
        why = prediction.too_large(request, place, planned)
        if why is None:
            _introduce(request, place)
            try:
                measured = (measure or training.measure)(request, place, watch)
            except (FastBrainError, MemoryError, RuntimeError) as error:
                why = out_of_memory.reason(error)
                if why is None:
                    raise
        # not in the handler, whose traceback holds the model
        if why is not None:
            ways_out = out_of_memory.advice(prediction.ways_out(request, place))
            print(f"fastbrain: {request.label}: out of memory: {why}\n{ways_out}", file=sys.stderr)
            return FAILED
    gpu = None
    if watch is not None:
        card = prediction.known(place)
        for text in watch.warnings(None if card is None else card.boost_mhz):
            warn(text)
        gpu = watch.facts()
    for text in measured.warnings():
        warn(text)
    foretold = prediction.facts(planned, place)
    together = ranks.predicted(request, place, measured)
    found = document.document(request, words, place, measured, foretold, gpu, said, together)
    # a reader like head may have had enough
    with suppress(BrokenPipeError):
        print(json.dumps(found) if request.json else line(found), flush=True)
    return DONE


def _introduce(request: Request, place: "Place") -> None:
    if sys.stdout is not None and sys.stdout.isatty() and not request.json:
        counts = request.config.parameter_counts()
        print(f"{place.name}, {counts}: 2 steps to warm up and {request.steps} timed ones")


def _many(path: str, words: list[str]) -> int:
    from fastbrain.sweep_arch import table

    parser = _bare_parser()
    add_flags(parser)
    options, strange = parser.parse_known_args(words)
    if strange:
        parser.error(
            f"with --table the shapes come from the file: leave out {' '.join(strange)}, or make "
            "it a row of the file"
        )
    return table.run(Path(path), words, json_wanted=options.json)


@contextmanager
def _python_warnings(warn: Callable[[str], None]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        yield


def _parser() -> argparse.ArgumentParser:
    parser = _bare_parser()
    add_shape(parser)
    add_flags(parser)
    return parser


def _bare_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m fastbrain.sweep_arch",
        usage="python -m fastbrain.sweep_arch [vocab d_model layers batch seq moe experts top_k] "
        "[flags]",
        description="Time training steps of one shape, and say what they need and how long a run "
        "would take.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_table_parser()],
        allow_abbrev=False,
    )


def _table_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastbrain.sweep_arch", add_help=False, allow_abbrev=False
    )
    many = parser.add_argument_group("many shapes")
    many.add_argument(
        "--table",
        metavar="FILE",
        help="a shape a line, each measured in a process of its own; writes FILE's name with .md "
        "and .json",
    )
    return parser
