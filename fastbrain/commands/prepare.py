"""`fastbrain prepare`: text into a token file, once, with a record of what it was made from."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbrain.commands.generate_options import refusing
from fastbrain.errors import InvalidConfig
from fastbrain.training.command import DONE

if TYPE_CHECKING:
    from fastbrain.tokens.prepare import Prepared

_EPILOG = """example:
  fastbrain prepare corpus.txt corpus.bin --tokenizer tokenizer.json
  fastbrain prepare stories.jsonl stories.bin --tokenizer tokenizer.json --field story
  fastbrain prepare nanogpt/train.bin train.bin --import-u16 --tokenizer tokenizer.json

(for a tokenizer.json, as `fastbrain tokenizer train corpus.txt .` leaves it.) SOURCE is a .txt file
(one document), .jsonl or .parquet (one to a row, under --field), a folder of these, also packed as
.gz or .zst. Every document ends with --separator. A second call with the same text, tokenizer and
settings does nothing. `fastbrain train` prepares text by itself; this does it ahead of time.
Exit codes: 0 done; 2 refused; 130 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `prepare`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("source", metavar="SOURCE", help="text, or a folder of it")
    parser.add_argument("target", metavar="TARGET.bin", help="the token file")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, or a folder with one")
    parser.add_argument("--field", default="text", help="where a row has its text (text)")
    parser.add_argument(
        "--separator",
        metavar="TOKEN",
        help="what ends every document; none for nothing (the tokenizer's end of text)",
    )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a bad document stops the work (the default), or is left out and counted",
    )
    parser.add_argument(
        "--import-u16",
        action="store_true",
        help="SOURCE is 16-bit ids, as nanoGPT writes them; --tokenizer checks their range",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Prepare what the options name and print it; returns the exit code."""
    return refusing(_prepare, options)


def _prepare(options: argparse.Namespace) -> int:
    if not options.target.endswith(".bin"):
        raise InvalidConfig(f"TARGET is {options.target}; the name of a token file ends in .bin")
    if options.import_u16:
        made = _imported(options)
    elif options.source.endswith(".bin"):
        raise InvalidConfig(
            f"{options.source} is a token file already; if it holds 16-bit ids, as nanoGPT writes "
            "them, add --import-u16"
        )
    elif options.tokenizer is None:
        raise InvalidConfig(
            "--tokenizer is missing; `fastbrain tokenizer train` makes one from the same text"
        )
    else:
        made = _tokenized(options)
    document = _document(made)
    print(json.dumps(document, indent=1) if options.json else "\n".join(_lines(document)))
    return DONE


def _tokenized(options: argparse.Namespace) -> "Prepared":
    from fastbrain.tokens.prepare import prepare
    from fastbrain.tokens.tokenizer import load_tokenizer
    from fastbrain.tokens.tokenizer_files import TokenizerFiles

    separator: str | int | None = options.separator
    if separator is None:
        files = TokenizerFiles.read(options.tokenizer)
        tokenizer, separator = files.tokenizer, files.eos_id
    else:
        tokenizer = load_tokenizer(options.tokenizer)
        separator = None if separator == "none" else separator
    return prepare(
        options.source,
        options.target,
        tokenizer,
        options.field,
        separator=separator,
        on_error=options.on_error,
    )


def _imported(options: argparse.Namespace) -> "Prepared":
    from fastbrain.commands.prepare_u16 import import_u16
    from fastbrain.tokens.tokenizer import load_tokenizer

    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    return import_u16(Path(options.source), Path(options.target), tokenizer)


def _document(made: "Prepared") -> dict[str, Any]:
    density = made.text_bytes / made.tokens if made.text_bytes else None
    return {
        "path": str(made.path),
        "record": f"{os.fspath(made.path)}.json",
        "documents": made.documents,
        "skipped": made.skipped,
        "tokens": made.tokens,
        "text_bytes": made.text_bytes,
        "bytes_per_token": None if density is None else round(density, 4),
        "max_id": made.max_id,
        "sha256": made.sha256,
        "tokenizer_sha256": made.tokenizer_sha256,
    }


def _lines(found: dict[str, Any]) -> list[str]:
    rows = {"token file": found["path"], "record": found["record"]}
    if found["documents"] is not None:
        skipped = f", {found['skipped']:,} left out" if found["skipped"] else ""
        rows["documents"] = f"{found['documents']:,}{skipped}"
    rows["tokens"] = f"{found['tokens']:,}"
    if found["bytes_per_token"] is not None:
        rows["bytes a token"] = f"{found['bytes_per_token']:.2f}"
    rows |= {"largest id": f"{found['max_id']:,}", "sha256": found["sha256"]}
    return [f"{label:15}{value}" for label, value in rows.items()]
