"""Kills runs with `kill -9` and goes on with them; each must end in the same bits.

    python -m bench.campaigns.kill_runs --kills 1000 --syscalls

Kills fall at random moments, at every operation of `fastbrain.atomic` in a short run, and with
--syscalls at every system call of one save. Whatever was killed must then end by exit code 0 with
the weights, moments, history and samples of a run that nothing disturbed, and leave no temporary.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.campaigns import operation_kills, random_kills, results, runs, syscall_kills

KIND = "kills"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 when every run came back to the last bit, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.campaigns.kill_runs", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=1000, help="at random moments (1000)")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="every Nth operation; 0: none of them (1)"
    )
    parser.add_argument("--syscalls", action="store_true", help="at every Nth system call, too")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    results.add_arguments(parser)
    options = parser.parse_args(arguments)
    if not hasattr(os, "fork"):
        parser.error("this system has no fork, without which a start takes seconds")
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {}
    if options.kills:
        parts["random"] = lambda at: random_kills.campaign(at, options.kills, options.seed, print)
    if options.every:
        parts["operations"] = lambda at: operation_kills.campaign(at, options.every, print)
    if options.syscalls:
        why_not = syscall_kills.unavailable()
        if why_not is None:
            parts["calls"] = lambda at: syscall_kills.campaign(at, max(options.every, 1), print)
        else:
            print(f"no kills at system calls: {why_not}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kills-", dir=options.scratch) as folder:
        for name, campaign in parts.items():
            began = time.monotonic()
            runs.lay_out(Path(folder, name))
            found[name] = campaign(Path(folder, name))
            found[name]["seconds"] = round(time.monotonic() - began, 1)
            equal, kills = found[name]["bit_equal"], found[name]["kills"]
            orphans = len(found[name]["orphans"])
            print(f"{name}: {equal} of {kills} kills bit-equal, {orphans} runs left temporaries")
    if options.out is not None:
        results.write(options.out, KIND, found)
    lost = any(part["failures"] or part["orphans"] for part in found.values())
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
