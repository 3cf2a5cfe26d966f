"""The package's own tokenizer: a byte-level BPE that is trained, loaded and told apart here."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastbrain import atomic
from fastbrain.errors import EmptyDataset, InvalidConfig, Serde
from fastbrain.tokens.small_file import read_small

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, "<|im_start|>", "<|im_end|>")  # ids 0 to 3
_MOST_BYTES = 64 << 20
# a tokenizer learns nothing new from more text than this, and its training holds every word
TRAINING_CHARACTERS = 100_000_000
_SMALLEST = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, split as GPT-2 does; any text round-trips.

    Ids 0 to 3 are the special tokens, then come the bytes, then what occurs most. The same texts
    give the same tokenizer; few texts give fewer tokens, and what comes after the first 100 million
    characters is not read. Raises InvalidConfig for a `vocab_size` too small for the bytes,
    EmptyDataset if there is no text.
    """
    if vocab_size < _SMALLEST:
        raise InvalidConfig(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {_SMALLEST}: the "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    read = 0

    def counted() -> Iterable[str]:
        nonlocal read
        for text in texts:
            read += len(text)
            yield text
            if read >= TRAINING_CHARACTERS:
                return

    tokenizer.train_from_iterator(counted(), trainer)
    if read == 0:
        raise EmptyDataset("there is no text to train a tokenizer on")
    return tokenizer


def load_tokenizer(path: atomic.StrPath) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in the one of a directory.

    Raises Io for a file that cannot be read, Serde for one that holds no tokenizer, or more than
    any has.
    """
    file = Path(path, "tokenizer.json") if os.path.isdir(path) else Path(path)
    data = read_small(file, _MOST_BYTES)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the class that the package raises
        raise Serde(f"{file} is not a tokenizer that tokenizers can load: {error}") from error


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """A digest of what the tokenizer does: equal however its file was laid out.

    Truncation and padding, which say how to call it, are left out.
    """
    spec = json.loads(tokenizer.to_str())
    for key in ("version", "truncation", "padding"):
        spec.pop(key, None)
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
