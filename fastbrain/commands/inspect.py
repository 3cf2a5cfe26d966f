"""`fastbrain inspect`: what a file or directory is, whether it is whole, and what it holds.

Nothing is loaded that a file merely claims to have, nothing is unpickled, nothing is changed.
"""

import argparse
import json
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastbrain import atomic
from fastbrain.errors import FastBrainError

if TYPE_CHECKING:
    from fastbrain.commands.inspect_finding import Finding

WHOLE, DAMAGED, REFUSED = 0, 1, 2

_EPILOG = """example:
  fastbrain inspect model.rbw
  fastbrain inspect runs/first/checkpoints/step-00002000 --tensors
  fastbrain inspect runs/first --json

PATH is a run, a checkpoint, a model, or any file of one: weights, optimizer states and adapters
(.rbw, .opt, .rbl, .safetensors, .gguf), token files (.bin), packed instructions (.packed),
tokenizers, configurations, manifests, metrics. What a file is is told from its content.
Exit codes: 0 whole, or nothing can tell; 1 damaged; 2 nothing of fastbrain's, or unreadable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `inspect`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", help="a file or a directory")
    parser.add_argument("--tensors", action="store_true", help="list all tensors")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Inspect what the options name and print it; returns the exit code."""
    path = Path(options.path)
    try:
        found = inspect(path)
    except FastBrainError as error:
        print(f"fastbrain: {error}", file=sys.stderr)
        return REFUSED
    if options.json:
        print(json.dumps(found.document(path, options.tensors), indent=1))
    else:
        print(found.text(path, options.tensors))
    return DAMAGED if found.whole is False else WHOLE


def inspect(path: Path) -> "Finding":
    """What is at `path`.

    Raises:
        FastBrainError: nothing of fastbrain's; or it cannot be read.
    """
    # these bring torch with them
    from fastbrain.commands import inspect_dirs, inspect_sniff
    from fastbrain.commands.inspect_finding import Unknown

    try:
        with atomic.io_errors("read", path):
            found = path.stat()
            if stat.S_ISDIR(found.st_mode):
                return inspect_dirs.described(path)
            if not stat.S_ISREG(found.st_mode):
                raise Unknown("no plain file")
            with path.open("rb") as file:
                head = file.read(inspect_sniff.HEAD)
        return _file(path, head, found.st_size)
    except Unknown as error:
        raise Unknown(f"{path} is {error}") from error


def _file(path: Path, head: bytes, size: int) -> "Finding":
    from fastbrain.commands import (
        inspect_beside,
        inspect_json,
        inspect_rows,
        inspect_sniff,
        inspect_tensors,
        inspect_tokens,
    )
    from fastbrain.training import manifest

    match inspect_sniff.kind(path, head, size):
        case "rbw":
            found = inspect_tensors.weights(path)
        case "opt":
            found = inspect_tensors.moments(path)
        case "rbl":
            found = inspect_tensors.adapters(path)
        case "gguf":
            found = inspect_tensors.gguf(path)
        case "packed":
            found = inspect_tokens.packed(path)
        case "safetensors":
            found = inspect_tensors.safetensors(path)
            inspect_beside.add_model(path, found)
        case "tokens":
            found = inspect_tokens.tokens(path)
        case "toml":
            found = inspect_json.settings(path)
        case "jsonl":
            found = inspect_rows.rows(path)
        case _:
            found = inspect_json.described(path, head)
    found.bytes = size
    if path.name != manifest.NAME:
        inspect_beside.compare(path, found)
    return found
