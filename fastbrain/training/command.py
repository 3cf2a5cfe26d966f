"""The command lines of `train` and `resume`, up to the point where torch is needed.

What can be found wrong without torch is found here, so that a slip is answered at once.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.training import config_files, resuming, run_dir
from fastbrain.training.progress import Console
from fastbrain.training.run_dir import Checkpoint, NoCheckpoint, RunDir
from fastbrain.training.settings import Settings

DONE, FAILED, REFUSED, NO_CHECKPOINT, RESUMABLE = 0, 1, 2, 3, 75
# what a shell says of a program that Ctrl-C ended
INTERRUPTED = 130

_TRAIN_EPILOG = """example:
  fastbrain train tiny-cpu data.train=corpus.txt --run runs/first
  fastbrain train tiny-cpu data.train=corpus.txt train.learning_rate=1e-3 --run runs/second

CONFIG is a TOML file or the name of a shipped configuration: {names}.
A run ends with exit code 0 (done), 75 (stopped, resumable), 1 (failed, last checkpoint kept),
2 (refused before the first step) or 3 (no intact checkpoint to go on from)."""

_RESUME_EPILOG = """example:
  fastbrain resume runs/first
  fastbrain resume runs/first --step 200 save.interval_steps=50

It goes on from the newest intact checkpoint and ends where an uninterrupted run would."""


@dataclass(frozen=True)
class Request:
    """A run to begin, or with `run` given to go on with, from `checkpoint` if there is one."""

    path: Path
    settings: Settings
    run: RunDir | None
    checkpoint: Checkpoint | None
    json: bool


def execute(options: argparse.Namespace, start: Callable[[Request, Console], int]) -> int:
    """Check what was asked for and `start` it; returns the exit code."""
    console = Console(sys.stderr if options.json else sys.stdout)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.say(f"warning: {message}")
        try:
            request = options.request(options, console)
        except FastBrainError as error:
            return refuse(error)
        return start(request, console)


def refuse(error: FastBrainError) -> int:
    """Say why there is no first step; returns the exit code."""
    print(f"fastbrain: {error}", file=sys.stderr)
    return NO_CHECKPOINT if isinstance(error, NoCheckpoint) else REFUSED


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _TRAIN_EPILOG.format(names=", ".join(config_files.shipped_names()))
    parser.add_argument("config", metavar="CONFIG", help="TOML file or shipped configuration")
    _add_common_arguments(parser)
    parser.add_argument("--run", metavar="DIR", help="the run's directory (runs/<name of CONFIG>)")
    parser.add_argument(
        "--resume", choices=["auto"], help="go on with the run in DIR if there is one"
    )
    parser.set_defaults(request=_train)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `resume`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _RESUME_EPILOG
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    _add_common_arguments(parser)
    parser.add_argument(
        "--step", type=int, help="go back to the checkpoint of this step; later ones are put aside"
    )
    parser.set_defaults(request=_resume)


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a command line on which overrides may come before and after options.

    argparse alone takes positional arguments up to the first option and refuses later ones.
    """
    options, rest = parser.parse_known_args(arguments)
    takes_overrides = "overrides" in options
    strange = [each for each in rest if each.startswith("-") or not takes_overrides]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if takes_overrides:
        options.overrides = [*options.overrides, *rest]
    return options


def _train(options: argparse.Namespace, console: Console) -> Request:
    settings = resuming.absolute(config_files.load(options.config, options.overrides))
    path = Path(options.run or Path("runs") / Path(options.config).stem)
    if not run_dir.exists(path):
        config_files.check_sources(settings)
        return Request(path, settings, None, None, options.json)
    if options.resume is None:
        raise InvalidConfig(
            f"there is a run at {path} already: go on with it by adding --resume auto, or choose "
            "another place with --run"
        )
    run = RunDir.open(path)
    stored = Settings.from_tables(run.tables)
    return _go_on(run, resuming.continued(stored, settings), console, options.json)


def _resume(options: argparse.Namespace, console: Console) -> Request:
    run = RunDir.open(Path(options.run))
    stored = Settings.from_tables(run.tables)
    wanted = Settings.from_tables(config_files.overridden(run.tables, options.overrides))
    settings = resuming.continued(stored, resuming.absolute(wanted))
    if options.step is not None:
        run.go_back(options.step)
    return _go_on(run, settings, console, options.json)


def _go_on(run: RunDir, settings: Settings, console: Console, json: bool) -> Request:
    run.sweep()
    return Request(run.path, settings, run, run.newest(console.say), json)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="a setting, like train.learning_rate=3e-4"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, all else to stderr"
    )
