"""A tokenizer made from text, and the two files that it is kept in."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.formats.huggingface import tokenizer_config_json
from fastbrain.formats.whole_directory import write_whole
from fastbrain.tokens.chat_template import CHATML
from fastbrain.tokens.prepare import texts, train_tokenizer
from fastbrain.tokens.tokenizer import END_OF_TEXT, PAD

_CONFIG = "tokenizer_config.json"


def train(source: Path, out: Path, vocab_size: int, field: str, force: bool) -> Tokenizer:
    """Train a tokenizer on the text of `source` and keep it at `out`.

    Args:
        source: as of `tokens.prepare`.
        out: a .json file, which gets its tokenizer_config.json beside it, or a directory for both.
        vocab_size: tokens at most.
        field: where a row of the source has its text.
        force: take the place of a tokenizer that is there.

    Raises:
        InvalidConfig: there is one at `out`, or `vocab_size` is too small for the bytes.
        EmptyDataset, InvalidDataset, Io: of the text; or `out` cannot be written.
    """
    file = out if out.suffix == ".json" else out / "tokenizer.json"
    there = [path for path in (file, file.with_name(_CONFIG)) if path.exists()]
    if there and not force:
        raise InvalidConfig(f"{there[0]} exists: choose another place, or replace it with --force")
    tokenizer = train_tokenizer(texts(source, field), vocab_size)
    config = tokenizer_config_json(
        eos=END_OF_TEXT, pad=PAD, model_max_length=0, chat_template=CHATML
    )
    # the model that will use it says how long a text may be
    del config["model_max_length"]
    content = {
        _CONFIG: json.dumps(config, indent=1) + "\n",
        file.name: tokenizer.to_str(pretty=True),
    }
    if file.parent.exists():
        for name, text in content.items():
            atomic.write_bytes(file.with_name(name), text.encode())
    else:
        _write_directory(file.parent, content)
    return tokenizer


def _write_directory(target: Path, content: dict[str, str]) -> None:
    def fill(folder: Path) -> None:
        for name, text in content.items():
            atomic.write_new(folder / name, [text.encode()])

    write_whole(target, fill)
