"""`fastbrain <verb>`: finds the verb; its module, and torch with it, is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from fastbrain.commands import (
    bench,
    chat,
    doctor,
    eval,
    export,
    generate,
    import_model,
    inspect,
    pause,
    plan,
    prepare,
    report,
    tokenizer,
    verify,
)
from fastbrain.parallel.launch import Launch
from fastbrain.training import command, sft_command
from fastbrain.training.command import Asked
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
        ("sft", "fine-tune a model on instructions", sft_command.add_arguments),
    ):
        add_arguments(verbs.add_parser(name, help=text, description=f"{text.capitalize()}."))
    for name, text, module in (
        ("generate", "continue prompts", generate),
        ("chat", "talk to a model", chat),
        ("eval", "score a model on text", eval),
        ("prepare", "turn text into a token file", prepare),
        ("tokenizer", "train a tokenizer, look at one, or use one", tokenizer),
        ("export", "write a model for other programs", export),
        ("import", "take in a model of other programs", import_model),
        ("doctor", "say what this machine has and whether it will do", doctor),
        ("pause", "ask a run to save and stop", pause),
        ("report", "write one HTML page about a run", report),
        ("verify", "compare every byte of a run's checkpoints with what was written", verify),
        ("inspect", "say what a file or folder is, and whether it is whole", inspect),
        ("plan", "predict what a shape costs on a card", plan),
        ("bench", "time the operations and whole jobs beside their peers", bench),
    ):
        verb = verbs.add_parser(name, help=text, description=f"{text.capitalize()}.")
        module.add_arguments(verb)
        verb.set_defaults(execute=module.run)
    options = command.parse(parser, arguments)
    try:
        if "execute" in options:
            if not (launch := Launch.find()).alone:
                return _refuse_several(launch)
            return _said(options.execute, options)
        return command.execute(options, _train)
    except KeyboardInterrupt:
        # while torch is being imported, or data made: there is nothing to save yet
        print("fastbrain: interrupted", file=sys.stderr)
        return command.INTERRUPTED


def _refuse_several(launch: Launch) -> int:
    if launch.leads:
        print(
            "fastbrain: this verb runs in one process: start it without torchrun; train, resume "
            "and sft are what several processes do together",
            file=sys.stderr,
        )
    return command.REFUSED


def _said(execute: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a verb that only prints; returns its exit code, 1 where its output has nowhere to go."""
    try:
        code = execute(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # a reader like head has had enough; nothing may be left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return command.DONE
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"fastbrain: cannot write the output: {error.strerror}", file=sys.stderr)
        return command.FAILED


def _train(asked: Asked, console: Console) -> int:
    from fastbrain import train

    return train.run(asked, console)


if __name__ == "__main__":
    sys.exit(main())
