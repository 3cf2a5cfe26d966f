"""Result files of the campaigns: what was done, and on which machine, by which command."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.machine import machine

FOLDER = Path(__file__).parents[1] / "results" / "campaigns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every campaign can be told."""
    # runs are made in a folder of their own, from which another's relative path leads nowhere
    parser.add_argument(
        "--scratch", type=_absolute, metavar="DIR", help="where to make runs (the temporary folder)"
    )
    parser.add_argument(
        "--out",
        type=_absolute,
        metavar="FILE",
        help="result file, such as bench/results/campaigns/X.json",
    )


def write(path: Path, kind: str, found: dict[str, Any]) -> None:
    """Keep what a campaign found, with the machine and the command."""
    words = " ".join(sys.argv[1:])
    module = Path(sys.argv[0]).stem
    about = {"command": f"python -m bench.campaigns.{module} {words}".strip(), **machine()}
    body = {"kind": kind, "machine": about, **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    print(f"{path} is written")


def _absolute(text: str) -> Path:
    return Path(text).absolute()
