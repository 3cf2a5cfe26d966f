"""`fastbrain report`: a run as one HTML page. Only reads the run, which may be training."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import FastBrainError
from fastbrain.training.report.page import page
from fastbrain.training.report.story import Story, read
from fastbrain.training.run_dir import RunDir

DONE, REFUSED = 0, 2

_EPILOG = """example:
  fastbrain report runs/first
  fastbrain report runs/first --out first.html --no-verify

The page is one file that needs no other. Every byte of the checkpoints is read and compared
with what was written, unless --no-verify is given.
Exit codes: 0 written, whatever it says; 2 refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `report`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    parser.add_argument("--out", metavar="FILE", help="of the page (RUN/report.html)")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the checkpoints: quicker"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Write the page that the options ask for; returns the exit code."""
    began = time.perf_counter()
    try:
        found = RunDir.open(Path(options.run))
        story = read(found, verify=not options.no_verify)
        content = page(story, time.time()).encode()
        path = found.path / "report.html" if options.out is None else Path(options.out)
        atomic.write_bytes(path, content)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    written = {"report": str(path), "bytes": len(content)}
    if options.json:
        seconds = round(time.perf_counter() - began, 3)
        print(json.dumps({**written, **_document(story), "seconds": seconds}))
    else:
        print(f"report: {path} ({len(content):,} bytes)")
    return DONE


def _document(story: Story) -> dict[str, Any]:
    counting = [each for each in story.kept if each.aside is None]
    best = story.best
    return {
        "run": str(story.run.path),
        "standing": story.standing,
        "step": story.step,
        "steps": story.total,
        "checkpoint": story.saved or None,
        "damaged": [each.step for each in counting if each.fault],
        "best_step": None if best is None else int(best[0]),
        "best_val_loss": None if best is None else best[1],
    }
