"""Texts that are always at hand, and what tests of tokens make of them."""

import itertools
import json
import sysconfig
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer

from fastbrain.tokens.jsonl import write_jsonl
from fastbrain.tokens.tokenizer import train_tokenizer

TOPICS = list(topics.values())
MIXED = (
    "It was the best of times, it was 1789. \u00c9t\u00e9 comme hiver: \u4e2d\u6587 \U0001f600.\n\n"
)


@cache
def small_tokenizer():
    """A byte-level tokenizer of 600 tokens; to be left as it is."""
    return train_tokenizer(TOPICS[:20], 600)


def copy_of(tokenizer):
    return Tokenizer.from_str(tokenizer.to_str())


@cache
def a_megabyte():
    """Code, prose and other scripts, 1.1 million characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    code = "".join(path.read_text("utf-8") for path in sorted(folder.glob("[a-h]*.py")))
    return (code + " ".join(TOPICS) + MIXED * 2000)[-1_100_000:]


def dumped(*texts, **options):
    """JSON lines with these texts."""
    lines = (json.dumps({"id": 1, "text": text}, **options) + "\n" for text in texts)
    return "".join(lines).encode()


def ids_of(tokenizer, *texts):
    """The ids of documents, each followed by id 0, their special tokens read as text."""
    plain = copy_of(tokenizer)
    plain.encode_special_tokens = True
    return list(itertools.chain(*([*plain.encode(text).ids, 0] for text in texts)))


def tokenize_lines(folder, data, tokenize=lambda text: [*map(ord, text)], separator=0, **options):
    """Write bytes to in.jsonl, tokenize it to out.bin, and give the ids in there."""
    source, target = folder / "in.jsonl", folder / "out.bin"
    source.write_bytes(data)
    count = write_jsonl(target, source, "text", separator, tokenize, **options)
    ids = np.fromfile(target, "<u4").tolist()
    assert count == len(ids)
    return ids


def codes(*texts):
    """What `tokenize_lines` makes of them."""
    return [code for text in texts for code in [*map(ord, text), 0]]
