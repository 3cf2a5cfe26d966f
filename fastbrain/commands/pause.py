"""`fastbrain pause RUN`: ask a run that is being trained to save and stop, from anywhere."""

import argparse
import json
import sys
import time
from pathlib import Path

from fastbrain import atomic
from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.training import lock, run_dir
from fastbrain.training.command import DONE, FAILED, REFUSED
from fastbrain.training.requests import STOP

_EPILOG = """example:
  fastbrain pause runs/first
  fastbrain pause runs/first --wait 60

It puts a file named STOP into the run's directory, which works over a network drive as well. The
run finishes its step, saves, and exits with 75; `fastbrain resume` goes on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="wait until it has stopped, at most so long"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code: 0 asked (with --wait: stopped), 1 not in time, 2 refused."""
    path = Path(options.run)
    try:
        if not run_dir.exists(path):
            raise InvalidConfig(f"there is no run at {path}: it has no config.toml")
        if not lock.is_held(path):
            raise InvalidConfig(f"nobody is training {path} now, so there is nothing to pause")
        with atomic.io_errors("write", path / STOP):
            (path / STOP).touch()
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    stopped = options.wait is not None and _stops(path, options.wait)
    said = "it has stopped" if stopped else "it will save and stop after this step"
    if options.json:
        print(json.dumps({"run": str(path), "stopped": stopped}))
    else:
        print(f"{path}: {said}; go on with fastbrain resume {path}")
    return FAILED if options.wait is not None and not stopped else DONE


def _stops(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while lock.is_held(path):
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True
