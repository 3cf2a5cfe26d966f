"""Run by `test_whole_directory`: exports a model over another, killed at random moments.

    python export_killer.py FOLDER KILLS

Whatever a kill left, the next call finds the old model or the new one, whole. Prints how many
exports were killed, and how many of those left something behind.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from directory_killer import held, names, write_nothing
from models import DENSE, MOE, model

from fastbrain.formats.hf_export import write_directory


def main(folder: Path, kills: int) -> None:
    target, made = folder / "out", {"old": model(DENSE), "new": model(MOE)}

    def export(which: str) -> None:
        lm = made[which]
        write_directory(target, lm.config, lm.weights(), max_shard_bytes=4_000, force=True)

    def child(which: str) -> int:
        pid = os.fork()
        if pid == 0:
            export(which)
            os._exit(0)
        return pid

    whole = {}
    for which in made:
        began = time.monotonic()
        assert os.waitpid(child(which), 0)[1] == 0
        took = time.monotonic() - began
        whole[which] = held(target)
    draw, killed, left = random.Random(0), 0, 0
    for attempt in range(kills):
        pid = child("old" if attempt % 2 else "new")
        time.sleep(draw.uniform(0, 1.1 * took))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        left += names(folder) != ["out"]
        write_nothing(target)
        assert names(folder) == ["out"]
        assert held(target) in whole.values()
    print(killed, left)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
