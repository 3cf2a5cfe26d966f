"""Runs the cases of one part, one after another, and notes each in the part's journal."""

import argparse
import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.device_check.journal import Journal, Skipped

AGAIN = 75  # exit status of a process whose GPU context is lost: the rest needs another one

_LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="whose cases run")
    parser.add_argument("journal", type=Path, help="file of what is found")
    parser.add_argument("until", type=float, help="end of the budget, in seconds since 1970")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on the CPU")
    arguments = parser.parse_args()
    journal = Journal(arguments.journal)
    longest = 0.0
    for name, run, *needs_s in importlib.import_module(arguments.module).cases(arguments.dry):
        if name in journal.cases:
            continue
        begun = time.time()
        left = arguments.until - begun
        # none is begun that would probably be killed
        if left < longest and not needs_s:
            journal.left_out = name
            break
        journal.begin(name)
        found, lost = _outcome(run) if left >= max(needs_s, default=0.0) else _extra(left, *needs_s)
        found["seconds"] = round(time.time() - begun, 2)
        longest = max(longest, time.time() - begun)
        journal.end(found)
        _show(name, found)
        if lost:
            sys.exit(AGAIN)
        _tidy()
    journal.done = True
    journal.write()


def _outcome(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """What a case found, and whether it has cost this process its GPU."""
    try:
        found = run()
        # a fault of a kernel shows at the next wait, and belongs to the case that launched it
        _wait()
    except Skipped as reason:
        return {"skipped": str(reason)}, _lost(traceback.format_exc())
    except Exception:
        text = traceback.format_exc()
        return {"failed": text[-6000:]}, _lost(text)
    return found, False


def _extra(left: float, needs_s: float) -> tuple[dict[str, Any], bool]:
    reason = f"may take {needs_s:.0f} s, and {left:.0f} were left; --budget gives more"
    return {"skipped": reason}, False


def _lost(text: str) -> bool:
    return any(sign in text for sign in _LOST)


def _show(name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"  FAILED {name}: {found['failed'].strip().splitlines()[-1][:300]}", flush=True)
    elif "skipped" in found:
        print(f"  skipped {name}: {found['skipped']}", flush=True)
    elif "line" in found:
        print(f"  {name}: {found.pop('line')}", flush=True)


def _wait() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _tidy() -> None:
    """Gives the memory of a case back before the next."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
