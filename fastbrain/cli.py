"""`fastbrain <verb>`: finds the verb; its module, and torch with it, is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence

from fastbrain.training import command
from fastbrain.training.command import Request
from fastbrain.training.progress import Console

_EPILOG = """example:
  fastbrain train tiny-cpu data.train=corpus.txt --run runs/first

`fastbrain <verb> --help` says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fastbrain",
        description="Train small language models, for days, on one machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="<verb>", required=True)
    for name, text, add_arguments in (
        ("train", "train a model from text", command.add_train_arguments),
        ("resume", "go on with a run", command.add_resume_arguments),
    ):
        add_arguments(verbs.add_parser(name, help=text, description=f"{text.capitalize()}."))
    return command.execute(command.parse(parser, arguments), _train)


def _train(request: Request, console: Console) -> int:
    from fastbrain import train

    return train.run(request, console)


if __name__ == "__main__":
    sys.exit(main())
