"""`fastbrain tokenizer`: train one, look at it, and turn text into ids and back."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbrain.commands.generate_options import at_least, note, refusing
from fastbrain.commands.generate_text import write
from fastbrain.errors import InvalidConfig, InvalidDataset, TokenOutOfRange
from fastbrain.training.command import DONE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastbrain.tokens.tokenizer_files import TokenizerFiles

_PATH_HELP = "tokenizer.json, a folder with one, a run, or a .gguf file"

_EPILOG = """example:
  fastbrain tokenizer train corpus.txt tokenizer.json --vocab-size 4096
  fastbrain tokenizer show tokenizer.json
  fastbrain tokenizer encode tokenizer.json "Once upon a time"
  fastbrain tokenizer decode tokenizer.json 4,5,6

(for a text in corpus.txt.) `fastbrain tokenizer train --help` says more, and so do the others."""

_TRAIN = """example:
  fastbrain tokenizer train corpus.txt tokenizer.json
  fastbrain tokenizer train corpus.txt my-tokenizer --vocab-size 8192 --json

A byte-level BPE split as GPT-2 does: any text comes back from its ids as it was. Ids 0 to 3 are
<|endoftext|>, <|pad|>, <|im_start|> and <|im_end|>. tokenizer_config.json, with the template for
conversations (ChatML), is put beside it. At most the first 100 million characters are read."""

_SHOW = """example:
  fastbrain tokenizer show tokenizer.json
  fastbrain tokenizer show runs/first --json"""

_ENCODE = """example:
  fastbrain tokenizer encode tokenizer.json "Once upon a time"
  fastbrain tokenizer encode tokenizer.json - --json < corpus.txt"""

_DECODE = """example:
  fastbrain tokenizer decode tokenizer.json 4,5,6
  fastbrain tokenizer decode tokenizer.json "4 5 6" --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `tokenizer`, and its own verbs."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    verbs = parser.add_subparsers(metavar="<verb>", required=True)
    train = _verb(verbs, "train", "make one from text", _TRAIN, _train)
    train.add_argument("source", metavar="SOURCE", help="text as for `fastbrain prepare`")
    train.add_argument("out", metavar="OUT", help="a .json file, or a folder")
    train.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens (4096)")
    train.add_argument("--field", default="text", help="where a row has its text (text)")
    train.add_argument("--force", action="store_true", help="replace the one that is there")
    show = _verb(verbs, "show", "say what it is", _SHOW, _show)
    show.add_argument("path", metavar="PATH", help=_PATH_HELP)
    encode = _verb(verbs, "encode", "text into ids", _ENCODE, _encode)
    encode.add_argument("path", metavar="PATH", help=_PATH_HELP)
    encode.add_argument("text", metavar="TEXT", help="- is standard input")
    encode.add_argument("--special", action="store_true", help="read <|...|> as a special token")
    decode = _verb(verbs, "decode", "ids into text", _DECODE, _decode)
    decode.add_argument("path", metavar="PATH", help=_PATH_HELP)
    decode.add_argument("ids", metavar="IDS", help="with commas or blanks; - is standard input")


def run(options: argparse.Namespace) -> int:
    """Do what the options ask for; returns the exit code."""
    return refusing(options.tokenizer_verb, options)


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    epilog: str,
    work: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=f"{text.capitalize()}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    parser.set_defaults(tokenizer_verb=work)
    return parser


def _train(options: argparse.Namespace) -> int:
    from fastbrain.commands.tokenizer_train import train

    asked = at_least(1, "--vocab-size", options.vocab_size)
    out = Path(options.out)
    made = train(Path(options.source), out, asked, options.field, options.force)
    if made.get_vocab_size() < asked:
        note(f"the text has no more than {made.get_vocab_size():,} tokens in it")
    options.path = options.out
    return _show(options)


def _show(options: argparse.Namespace) -> int:
    from fastbrain.tokens.tokenizer import load_tokenizer, tokenizer_sha256

    path = _path(options.path)
    files = _files(path)
    tokenizer = load_tokenizer(path) if files is None else files.tokenizer
    spec = json.loads(tokenizer.to_str())
    special = {
        token.content: id
        for id, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if token.special
    }
    document = {
        "path": str(path),
        "size": 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        "model": spec["model"].get("type"),
        "special_tokens": special,
        "pre_tokenizer": _kinds(spec["pre_tokenizer"]),
        "eos": None if files is None else files.eos,
        "pad": None if files is None else files.pad,
        "bos": None if files is None else files.bos,
        "ends": [] if files is None else list(files.ends),
        "chat_template": files is not None and files.chat_template is not None,
        "sha256": tokenizer_sha256(tokenizer),
    }
    if options.json:
        write(json.dumps(document, indent=1) + "\n")
    else:
        write("\n".join(_lines(document)) + "\n")
    return DONE


def _encode(options: argparse.Namespace) -> int:
    from fastbrain.tokens.encode import plain

    tokenizer = plain(_loaded(_path(options.path)))
    tokenizer.encode_special_tokens = not options.special
    found = tokenizer.encode(_text(options.text), add_special_tokens=False)
    if options.json:
        document = {"ids": found.ids, "tokens": found.tokens, "count": len(found.ids)}
        write(json.dumps(document) + "\n")
    else:
        write(",".join(map(str, found.ids)) + "\n")
    return DONE


def _decode(options: argparse.Namespace) -> int:
    from fastbrain.commands.generate_prompts import parsed_ids

    tokenizer = _loaded(_path(options.path))
    ids = parsed_ids(_text(options.ids), "IDS")
    for id in ids:
        if tokenizer.id_to_token(id) is None:
            raise TokenOutOfRange(id, _size(tokenizer))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    write(json.dumps({"ids": ids, "text": text}) + "\n" if options.json else text + "\n")
    return DONE


def _loaded(path: Path) -> "Tokenizer":
    from fastbrain.tokens.tokenizer import load_tokenizer

    files = _files(path)
    return load_tokenizer(path) if files is None else files.tokenizer


def _files(path: Path) -> "TokenizerFiles | None":
    """A tokenizer with what is said beside it; None where no token of it could end a text."""
    from fastbrain.formats.gguf_read import GgufModel
    from fastbrain.tokens.tokenizer_files import TokenizerFiles
    from fastbrain.training import manifest
    from fastbrain.training.vocabulary import Vocabulary

    if path.suffix == ".gguf":
        found = GgufModel.open(path).tokenizer_files()
        if found is None:
            raise InvalidConfig(f"{path} has no tokenizer in it")
        return found
    record = path.with_name("corpus.json")
    if path.is_file() and record.is_file():  # of a run
        return Vocabulary.open(path, manifest.document(record)).files
    try:
        return TokenizerFiles.read(path)
    except InvalidConfig:
        return None


def _size(tokenizer: "Tokenizer") -> int:
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _path(name: str) -> Path:
    """The tokenizer of a file, a folder or a run; of a GGUF model, the model."""
    path = Path(name)
    inside = path / "data" / "tokenizer.json"
    return inside if inside.is_file() and not (path / "tokenizer.json").exists() else path


def _text(given: str) -> str:
    """An argument, or standard input where it is -."""
    data = sys.stdin.buffer.read() if given == "-" else given.encode(errors="surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidDataset(
            f"the text is not UTF-8: there is a byte {data[error.start]:#x} at {error.start}"
        ) from error


def _kinds(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The steps of a pre-tokenizer by name."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return ", ".join(str(step.get("type")) for step in steps)


def _lines(found: dict[str, Any]) -> list[str]:
    special = [f"{id} {token}" for token, id in found["special_tokens"].items()]
    more = f" and {len(special) - 16:,} more" if len(special) > 16 else ""
    rows = {
        "path": found["path"],
        "size": f"{found['size']:,} tokens",
        "model": found["model"],
        "special tokens": (", ".join(special[:16]) or "none") + more,
        "pre-tokenizer": found["pre_tokenizer"] or "none",
        "end of text": found["eos"] or "none",
        "padding": found["pad"] or "none",
        "begin of text": found["bos"] or "none",
        "generation ends": ", ".join(map(str, found["ends"])) or "never by itself",
        "chat template": "yes" if found["chat_template"] else "none; ChatML is used",
        "sha256": found["sha256"],
    }
    return [f"{label:17}{value}" for label, value in rows.items()]
