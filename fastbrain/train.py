"""`python -m fastbrain.train CONFIG`: trains a model from text, or goes on with a run."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence

from fastbrain.errors import FastBrainError
from fastbrain.training import command, program
from fastbrain.training.command import Request
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


def run(request: Request, console: Console) -> int:
    """Do what was asked for; returns the exit code."""
    trainer = None
    try:
        if request.going_on is None:
            trainer = program.begin(request.path, request.lock, request.settings, console)
        else:
            trainer = program.go_on(request.going_on, request.lock, request.settings, console)
        finished = trainer.run()
        if request.json:
            print(json.dumps(trainer.summary()))
        return command.DONE if finished else command.RESUMABLE
    except FastBrainError as error:
        if trainer is None:
            return command.refuse(error)
        console.complain(trainer.failure(error))
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
