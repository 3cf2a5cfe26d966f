"""What `fastbrain generate` continues: prompts from the command line and from files, as ids."""

import argparse
import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastbrain import atomic
from fastbrain.commands.generate_options import note
from fastbrain.errors import (
    EmptyDataset,
    InvalidConfig,
    InvalidDataset,
    SequenceTooLong,
    TokenOutOfRange,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastbrain.tokens.tokenizer_files import TokenizerFiles
    from fastbrain.training.pretrained import Pretrained


class Prompt(NamedTuple):
    """Ids to continue, and the text that they stand for; None where they were given as ids."""

    text: str | None
    ids: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the prompts."""
    asked = parser.add_argument_group("prompts, of which there may be several")
    asked.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    asked.add_argument(
        "--prompts",
        metavar="FILE",
        help='one to a line, or JSON lines (.jsonl) with a "prompt"; - is standard input',
    )
    asked.add_argument(
        "--prompt-ids", action="append", default=[], metavar="1,2,3", help="a prompt as ids"
    )
    asked.add_argument(
        "--chat", action="store_true", help="each prompt is a message: apply the chat template"
    )
    asked.add_argument(
        "--special", action="store_true", help="read <|...|> in a prompt as a special token"
    )


def given(options: argparse.Namespace) -> tuple[list[str], list[list[int]]]:
    """The prompts that are text, and those that are ids; InvalidConfig where there are none."""
    if options.chat and options.special:
        raise InvalidConfig(
            "--special does nothing with --chat: the template puts the special tokens there, and "
            "messages are plain text"
        )
    texts = [_checked(text, "--prompt") for text in options.prompt]
    if options.prompts is not None:
        texts += _from_file(options.prompts)
    ids = [parsed_ids(each, "--prompt-ids") for each in options.prompt_ids]
    if not texts and not ids:
        raise InvalidConfig(
            "there is no prompt: give --prompt TEXT, --prompts FILE or --prompt-ids 1,2,3"
        )
    return texts, ids


def encoded(
    found: "Pretrained", texts: list[str], ids: list[list[int]], options: argparse.Namespace
) -> tuple[list[Prompt], tuple[int, ...]]:
    """The prompts as ids, and the ids that end what follows them.

    Raises:
        InvalidConfig: text for a model without a tokenizer.
        SequenceTooLong: a prompt that leaves no room for a token after it.
        TokenOutOfRange: an id outside the vocabulary.
    """
    files = found.files
    prompts: list[Prompt] = []
    ends: tuple[int, ...] = () if files is None else files.ends
    if files is None and (texts or options.chat):
        raise InvalidConfig(
            f"{found.source} has no tokenizer beside it: name one with --tokenizer, or give "
            "--prompt-ids"
        )
    if files is not None and options.chat:
        from fastbrain.tokens.chat_template import ChatTemplate

        template = ChatTemplate(files)
        note_template(files)
        ends = template.end_ids
        for text in texts:
            message = {"role": "user", "content": text}
            prompts.append(Prompt(text, template.encode([message], True).ids))
    elif files is not None:
        tokenizer = _reading(files.tokenizer, options.special)
        prompts += [Prompt(text, _ids(text, tokenizer, files)) for text in texts]
    prompts += [Prompt(None, each) for each in ids]
    config = found.model.config
    for each in prompts:
        for id in each.ids:
            if not 0 <= id < config.vocab_size:
                raise TokenOutOfRange(id, config.vocab_size)
        if len(each.ids) > config.max_seq_len:
            raise SequenceTooLong(len(each.ids), config.max_seq_len)
    return prompts, ends


def note_template(files: "TokenizerFiles") -> None:
    """Say so where a model has no template of its own."""
    if files.chat_template is None:
        note("this model has no chat template of its own; ChatML is used")


def parsed_ids(text: str, name: str) -> list[int]:
    """Ids written with commas or blanks between them; InvalidConfig for what is none."""
    words = text.replace(",", " ").split()
    if not words:
        raise InvalidConfig(f"{name} is empty; give ids like 1,2,3")
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) <= 10):
            raise InvalidConfig(f"{name}: {word[:40]!r} is no id; give ids like 1,2,3")
    return [int(word) for word in words]


def _reading(tokenizer: "Tokenizer", special: bool) -> "Tokenizer":
    from fastbrain.tokens.encode import plain

    copy = plain(tokenizer)
    copy.encode_special_tokens = not special
    return copy


def _ids(text: str, tokenizer: "Tokenizer", files: "TokenizerFiles") -> list[int]:
    # with what the tokenizer puts before every text, such as a token that begins it
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
    if ids:
        return ids
    # nothing yet: what comes after the end of the text before, or after the beginning of one
    begin = None if files.bos is None else tokenizer.token_to_id(files.bos)
    return [files.eos_id if begin is None else begin]


def _from_file(name: str) -> list[str]:
    from fastbrain.tokens.sources import JSONL

    if name.endswith(JSONL):
        from fastbrain.tokens.documents import Tally, json_lines
        from fastbrain.tokens.faults import Faults

        lines = json_lines(name, "prompt", Faults("fail"), Tally(), lambda read: None)
        found = ["".join(each.pieces) for each in lines]
    elif name == "-":
        found = text_lines(sys.stdin.buffer.read(), "standard input")
    else:
        with atomic.io_errors("read", name):
            found = text_lines(Path(name).read_bytes(), name)
    if not found:
        raise EmptyDataset(f"{name} has no prompts in it")
    return found


def text_lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 text that are not blank; InvalidDataset, with the line, for other text."""
    found = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InvalidDataset(
                f"{name}, line {number}: it is not UTF-8: there is a byte "
                f"{line[error.start]:#x} at {error.start}"
            ) from error
        if text.strip():
            found.append(text)
    return found


def _checked(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfig(f"{name} is not UTF-8: {text[:60]!a}") from error
    return text
