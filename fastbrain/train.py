"""`python -m fastbrain.train CONFIG`: trains a model from text, or goes on with a run."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

from fastbrain.errors import FastBrainError
from fastbrain.parallel.ranks import RankLost, Ranks
from fastbrain.training import command, following, program
from fastbrain.training.command import Asked
from fastbrain.training.guard import Diverged
from fastbrain.training.progress import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this command with these arguments, those of the process by default.

    Returns the exit code: 0 done, 75 stopped and resumable, 1 failed with the last checkpoint
    kept, 2 refused before the first step, 3 no intact checkpoint to go on from, 4 another process
    is training the run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastbrain.train", description="Train a language model from text."
    )
    command.add_train_arguments(parser)
    return command.execute(command.parse(parser, arguments), run)


def run(asked: Asked, console: Console) -> int:
    """Do what was asked for, together with the other ranks; returns the exit code."""
    try:
        ranks = Ranks.join(asked.launch)
    except FastBrainError as error:
        console.complain(str(error))
        return command.FAILED if isinstance(error, RankLost) else command.REFUSED
    code = _run(asked, ranks, console)
    if ranks.size == 1:
        return code
    if code in (command.DONE, command.RESUMABLE):
        try:
            ranks.leave()
        except FastBrainError as error:
            # all is saved, but not all that was to come after it is done
            console.complain(str(error))
            code = command.FAILED
    if code == command.RESUMABLE and asked.launch.restarts_left:
        # torchrun would start again whatever ends with anything but 0
        return command.DONE
    if code != command.DONE:
        # threads that still wait for another rank would make an abort of an orderly end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(asked: Asked, ranks: Ranks, console: Console) -> int:
    trainer = None
    try:
        request = following.heard(ranks, asked)
        if isinstance(request, int):
            return request
        if request.going_on is None:
            trainer = program.begin(request, ranks, console)
        else:
            trainer = program.go_on(request, request.going_on, ranks, console)
        finished = trainer.run()
        if request.json:
            print(json.dumps(trainer.summary()))
        return command.DONE if finished else command.RESUMABLE
    except FastBrainError as error:
        if trainer is None:
            # one rank that was refused says why, and the first for all
            silent = isinstance(error, RankLost) and not ranks.leads
            return command.REFUSED if silent else command.refuse(error, console)
        if ranks.leads:
            console.complain(trainer.failure(error))
        elif not isinstance(error, Diverged):  # which all of them find
            console.complain(str(error))
        return command.FAILED
    except KeyboardInterrupt:
        console.complain("interrupted" + ("" if trainer is None else f"; {trainer.way_back()}"))
        return command.INTERRUPTED
    except Exception:
        # a driver that went away, or a mistake of ours: what was saved is what matters now
        if trainer is None:
            raise
        console.complain(f"{traceback.format_exc()}{trainer.way_back()}")
        return command.FAILED


if __name__ == "__main__":
    sys.exit(main())
