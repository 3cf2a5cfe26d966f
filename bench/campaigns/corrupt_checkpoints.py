"""Damages checkpoints in thousands of ways; each must be refused by name and an older one used.

    python -m bench.campaigns.corrupt_checkpoints --count 4000

The newest checkpoint of a run is cut, flipped, swapped or forged, and put back. Each time the
newest intact one is looked for: the refusal must name the file, the damaged directory must be
renamed with every byte kept, and the next older one must be found. Of every kind one run then goes
on to its end, to the bits of a run that nothing disturbed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.campaigns import results, runs
from bench.campaigns.corruption import Campaign

KIND = "corruptions"

# all are kept, so that there is always an older one
_OVERRIDES = ("train.max_steps=4", "eval.interval=4", "save.keep=9")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 when all damage was found, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.campaigns.corrupt_checkpoints", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=4000, help="flipped bits, in all files (4000)")
    parser.add_argument("--seed", type=int, default=0, help="of the places of the bits (0)")
    results.add_arguments(parser)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="corruptions-", dir=options.scratch) as folder:
        runs.lay_out(Path(folder), text=True)
        run, foreign = Path("run"), Path("foreign")
        runs.finish(run, *_OVERRIDES)
        runs.finish(foreign, *_OVERRIDES, "train.seed=7")
        campaign = Campaign(run, foreign, resume=runs.finish)
        campaign.run(options.count, options.seed, print)
        found = campaign.result()
    found["seconds"] = round(time.monotonic() - began, 1)
    print(f"{found['found']} of {found['trials']} cases of damage were found")
    if options.out is not None:
        results.write(options.out, KIND, found)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
