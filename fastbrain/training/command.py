"""The command lines of `train` and `resume`, up to the point where torch is needed.

What can be found wrong without torch is found here, so that a slip is answered at once.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot
from fastbrain.parallel.launch import Launch
from fastbrain.training import config_files, guard_log, manifest, resuming, run_dir, toml
from fastbrain.training.lock import Lock, Locked, is_of_this_launch
from fastbrain.training.progress import Console
from fastbrain.training.run_dir import Checkpoint, NoCheckpoint, RunDir
from fastbrain.training.settings import LENGTHS, Settings

DONE, FAILED, REFUSED, NO_CHECKPOINT, LOCKED, RESUMABLE = 0, 1, 2, 3, 4, 75
# see Launch.run_option
RUN = ("--run", "--run-dir")
# what a shell says of a program that Ctrl-C ended
INTERRUPTED = 130

_TRAIN_EPILOG = """example:
  fastbrain train tiny-cpu data.train=corpus.txt --run runs/first
  fastbrain train tiny-cpu data.train=corpus.txt train.learning_rate=1e-3 --run runs/second

CONFIG is a TOML file or the name of a shipped configuration: {names}.
A run ends with exit code 0 (done), 75 (stopped, resumable), 1 (failed, last checkpoint kept),
2 (refused before the first step), 3 (no intact checkpoint to go on from) or 4 (another process is
training it)."""

_RESUME_EPILOG = """example:
  fastbrain resume runs/first
  fastbrain resume runs/first --step 200 save.interval_steps=50
  fastbrain resume runs/first --override train.learning_rate=1e-4

It goes on from the newest intact checkpoint and ends where an uninterrupted run would."""


@dataclass(frozen=True)
class Request:
    """A run to begin, or with `going_on` given to go on with; the first rank holds its lock."""

    path: Path
    lock: Lock | None
    settings: Settings
    going_on: "GoingOn | None"
    json: bool


@dataclass(frozen=True)
class GoingOn:
    """Where and how a run goes on.

    Attributes:
        run: its directory.
        checkpoint: from which; None where there is none yet.
        then: the settings up to now.
        overriding: whether something is changed on purpose now, so that config.toml changes.
        overridden: dotted keys changed on purpose, now or earlier.
        remake_data: whether the token files are to be made anew, from what `data` names now.
    """

    run: RunDir
    checkpoint: Checkpoint | None
    then: Settings
    overriding: bool
    overridden: frozenset[str]
    remake_data: bool


@dataclass(frozen=True)
class Asked:
    """What became of a command line: a request, or the exit code that it was refused with.

    On ranks other than the first it is neither: they hear it from that one.
    """

    launch: Launch
    request: Request | None = None
    refused: int | None = None


def execute(options: argparse.Namespace, start: Callable[[Asked, Console], int]) -> int:
    """Check what was asked for and `start` it; returns the exit code.

    Of several processes that torchrun started the first one does, and the others follow.
    """
    try:
        launch = Launch.find()
    except FastBrainError as error:
        return refuse(error)
    with ExitStack() as stack:
        stream = sys.stderr if options.json else sys.stdout
        if not launch.leads:
            stream = stack.enter_context(open(os.devnull, "w"))
        console = Console(stream, launch.rank)
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = lambda message, *_, **__: console.say(f"warning: {message}")
        asked = Asked(launch)
        if launch.leads:
            try:
                request = options.request(options, console)
                stack.callback(request.lock.release)
                asked = Asked(launch, request)
            except FastBrainError as error:
                asked = Asked(launch, refused=refuse(error))
        if launch.alone and asked.refused is not None:
            return asked.refused
        return start(asked, console)


def refuse(error: FastBrainError, console: Console | None = None) -> int:
    """Say why there is no first step; returns the exit code."""
    (console or Console(sys.stderr)).complain(str(error))
    if isinstance(error, Locked):
        return LOCKED
    return NO_CHECKPOINT if isinstance(error, NoCheckpoint) else REFUSED


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _TRAIN_EPILOG.format(names=", ".join(config_files.shipped_names()))
    parser.add_argument("config", metavar="CONFIG", help="TOML file or shipped configuration")
    add_common_arguments(parser)
    parser.add_argument(*RUN, metavar="DIR", help="the run's directory (runs/<name of CONFIG>)")
    parser.add_argument(
        "--resume", choices=["auto"], help="go on with the run in DIR if there is one"
    )
    parser.set_defaults(request=train_request)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `resume`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _RESUME_EPILOG
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    add_common_arguments(parser)
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
    with _silent_unless_first():
        options, rest = parser.parse_known_args(arguments)
    takes_overrides = "overrides" in options
    strange = [each for each in rest if each.startswith("-") or not takes_overrides]
    if strange:
        with _silent_unless_first():
            parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if takes_overrides:
        options.overrides = [*options.overrides, *rest]
    return options


@contextmanager
def _silent_unless_first() -> Iterator[None]:
    """All processes of a run read the same command line; one says what is wrong with it."""
    # what is wrong with the environment is said once the line is read
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def train_request(options: argparse.Namespace, console: Console) -> Request:
    """The run that the options of `train` ask for, its lock taken.

    Raises:
        FastBrainError: what speaks against it.
    """
    overrides = [*options.overrides, *options.override]
    settings = config_files.load(options.config, overrides).absolute()
    path = Path(options.run or Path("runs") / Path(options.config).stem)
    if run_dir.exists(path):
        # torchrun starts what it started before with the same words
        again = Launch.find().by_torchrun and is_of_this_launch(path)
        if options.resume is None and not again:
            raise InvalidConfig(
                f"there is a run at {path} already: go on with it by adding --resume auto, or "
                f"choose another place with {Launch.find().run_option}"
            )
    else:
        config_files.check_sources(settings)
    with _unless_refused(Lock.acquire(path)) as lock:
        if not run_dir.exists(path):
            _refuse_orphans(path)
            run_dir.sweep(path)
            return Request(path, lock, settings, None, options.json)
        return _go_on(RunDir.open(path), lock, settings, options, console)


def _resume(options: argparse.Namespace, console: Console) -> Request:
    run = RunDir.open(Path(options.run))
    overrides = [*options.overrides, *options.override]
    wanted = Settings.from_tables(config_files.overridden(run.tables, overrides))
    with _unless_refused(Lock.acquire(run.path)) as lock:
        return _go_on(run, lock, wanted.absolute(), options, console, options.step)


def _go_on(
    run: RunDir,
    lock: Lock,
    wanted: Settings,
    options: argparse.Namespace,
    console: Console,
    step: int | None = None,
) -> Request:
    asked = {toml.parse_override(each)[0] for each in options.override}
    strange = sorted(asked - set(resuming.OVERRIDABLE))
    if strange:
        raise InvalidConfig(
            f"--override {strange[0]}: this cannot be changed in the middle of a run, or needs no "
            f"--override; it is for {', '.join(resuming.OVERRIDABLE)}"
        )
    lengths = {f"train.{name}" for name in LENGTHS}
    if asked & lengths:
        asked |= lengths  # one takes another's place
    sources = {"data.train", "data.validation"}
    if remake := bool(asked & sources):
        config_files.check_sources(wanted, sources)
    run_dir.sweep(run.path)
    run.carry_out(guard_log.rollbacks(run.guard_log))
    found = run.newest(console.say) if step is None else run.intact(step)
    then = Settings.from_tables(run.tables)
    overridden = frozenset(asked | set(run.tables.get("overridden", ())))
    if found is not None:
        # not config.toml, which an editor may have changed since
        tables, rollbacks = _recorded(found.path / "trainer_state.json")
        then = Settings.from_tables(tables)
        guard_log.mend(run.guard_log, rollbacks, console.say)
    settings = resuming.continued(then, wanted, found.step if found else 0, overridden)
    if step is not None:
        run.go_back(step)  # only now that nothing speaks against it
    going_on = GoingOn(run, found, then, bool(asked), overridden, remake)
    return Request(run.path, lock, settings, going_on, options.json)


def _recorded(path: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """The settings and the rollbacks of a trainer_state.json."""
    recorded = manifest.document(path)
    try:
        return dict(recorded["config"]), list(recorded["guard"]["data_skips"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSnapshot(f"{path} is not one that fastbrain wrote: {error!r}") from error


def _refuse_orphans(path: Path) -> None:
    if any(path.glob("checkpoints/step-*")):
        raise InvalidConfig(
            f"{path} has checkpoints, but no config.toml that says what they are of: put it back, "
            f"or begin another run in another place with {Launch.find().run_option}"
        )


@contextmanager
def _unless_refused(lock: Lock) -> Iterator[Lock]:
    """Gives the lock back where the block raises."""
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser what `train`, `resume` and `sft` share."""
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="a setting, like train.learning_rate=3e-4"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change what decides the results, in the middle of a run; may be given again",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, all else to stderr"
    )
