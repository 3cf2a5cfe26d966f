"""A token file: how many ids, the largest, its digest, and whether its record agrees."""

import hashlib
from pathlib import Path

import numpy as np

from fastbrain import atomic
from fastbrain.commands import inspect_beside
from fastbrain.commands.inspect_finding import Finding
from fastbrain.errors import FastBrainError
from fastbrain.tokens import packed_file
from fastbrain.tokens.token_file import TokenFile

_BLOCK = 4 << 20


def tokens(path: Path) -> Finding:
    """A file of 32-bit token ids; reads all of it once, a piece at a time.

    Raises:
        Io: it cannot be read.
    """
    finding = Finding("a token file: 32-bit ids, little-endian")
    try:
        TokenFile.open(path, seed=0).close()
    except FastBrainError as error:
        return finding.damaged(error)
    largest, digest, block = 0, hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(block)
    with atomic.io_errors("read", path), path.open("rb") as file:
        while count := file.readinto(block):
            digest.update(view[:count])
            ids = np.frombuffer(block, "<u4", count // 4)
            largest = max(largest, int(ids.max(initial=0)))
    finding.facts = {
        "tokens": path.stat().st_size // 4,
        "max id": largest,
        "sha256": digest.hexdigest(),
    }
    finding.checked = "there is no record of it beside it"
    known = inspect_beside.record(path)
    if known is not None and known.max_id not in (None, largest):
        return finding.damaged(f"its largest id is {largest}, and {known.source} says otherwise")
    return finding


def packed(path: Path) -> Finding:
    """A file of packed instructions; reads all of it once, a piece at a time.

    Raises:
        Io: it cannot be read.
    """
    finding = Finding("packed instructions: rows of 32-bit words, little-endian")
    counts = {"words": 0, "tokens": 0, "documents": 0, "targets": 0}
    with atomic.io_errors("read", path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            if len(block) % 4:
                return finding.damaged(f"{path} was cut short: its size is no multiple of 4")
            words = np.frombuffer(block, "<u4")
            real = words[words != packed_file.PADDING]
            counts["words"] += words.size
            counts["tokens"] += real.size
            counts["documents"] += int(np.count_nonzero(real & packed_file.BEGIN))
            counts["targets"] += int(np.count_nonzero(real & packed_file.TARGET))
    finding.facts = dict(counts)
    finding.checked = "there is no record of it beside it"
    return finding
