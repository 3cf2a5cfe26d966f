"""The tokens of a run: made once, split into training and held-out, known by their fingerprint.

Text becomes `data/train.bin` in the run directory, so that a run needs nothing else to go on; a
token file is used where it lies. `data/corpus.json` says what they were, and a resumed run
compares: rows drawn from another file would be another run.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidDataset, Serde, TokenOutOfRange
from fastbrain.tokens.prepare import Prepared, prepare
from fastbrain.tokens.token_file import TokenFile
from fastbrain.training import manifest
from fastbrain.training.settings import Settings
from fastbrain.training.vocabulary import Vocabulary

# an evaluation reads at most this much held-out text: the loss of a million tokens is known to
# about 0.003, and 5 % of a large corpus would take longer to score than to train on
EVALUATION_TOKENS = 2**20

_BLOCK = 1 << 20

# what is known of a token file, and in which kind of value
_KNOWN = {"path": str, "bytes": int, "tokens": int, "max_id": int, "blocks_sha256": str}


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is scored on.

    Attributes:
        train, held_out: the tokens, `held_out` at most `EVALUATION_TOKENS` of them.
        vocabulary: None for a token file without a tokenizer.
        fingerprint: of the token files: bytes, tokens, largest id, digests.
        replaced: fingerprints of files that earlier parts of the run were trained on.
        bytes_per_token: UTF-8 bytes of held-out text to a token; None without a tokenizer.
    """

    train: TokenFile
    held_out: TokenFile
    vocabulary: Vocabulary | None
    fingerprint: dict[str, Any]
    replaced: list[dict[str, Any]]
    bytes_per_token: float | None

    def text(self, ids: list[int]) -> str:
        """The text of ids, or the ids where there is no tokenizer."""
        if self.vocabulary is None:
            return " " + " ".join(map(str, ids))
        return self.vocabulary.text(ids)


def make(settings: Settings, folder: Path, say: Callable[[str], object]) -> int:
    """Tokenize what has to be into `folder`; returns the vocabulary that the model needs.

    Raises:
        InvalidConfig: a token file whose vocabulary nothing tells, or a model vocabulary smaller
            than the tokenizer's.
        FastBrainError: as `tokens.prepare`, and as `Vocabulary.make`.
    """
    data = settings.data
    with atomic.io_errors("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    vocabulary = None
    if data.tokenizer is not None or not data.train.endswith(".bin"):
        vocabulary = Vocabulary.make(data.tokenizer, data.train, folder / "tokenizer.json")
    named = settings.model.get("vocab_size")
    size = named if vocabulary is None else vocabulary.size
    if size is None:
        raise InvalidConfig(
            f"{data.train} holds ids, and nothing says of how many: give data.tokenizer, the "
            "tokenizer.json that made it, or model.vocab_size"
        )
    if named is not None and named < size:
        raise InvalidConfig(
            f"model.vocab_size is {named}, and the tokenizer has {size} tokens: give at least as "
            "many, or leave it out to take the tokenizer's"
        )
    record: dict[str, Any] = {"eos": None, "pad": None, "tokenizer_sha256": None}
    if vocabulary is not None:
        record = {
            "eos": vocabulary.eos,
            "pad": vocabulary.pad,
            "tokenizer_sha256": vocabulary.sha256,
        }
    record["files"] = _prepare(settings, folder, vocabulary, named or size, say)
    _write(record, folder)
    return int(named or size)


def remake(settings: Settings, folder: Path, say: Callable[[str], object]) -> None:
    """Make the token files anew in the middle of a run, with the tokenizer that it has.

    What they were is remembered, so that checkpoints made with them still belong to the run.

    Raises:
        FastBrainError: as `make`.
    """
    record = _record(folder)
    vocabulary = _vocabulary(record, folder)
    before = record["files"]
    size = int(settings.model["vocab_size"])
    record["files"] = _prepare(settings, folder, vocabulary, size, say)
    if record["files"] != before:
        record["replaced"] = [*record.get("replaced", []), before]
    _write(record, folder)


def _prepare(
    settings: Settings,
    folder: Path,
    vocabulary: Vocabulary | None,
    vocab_size: int,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Token files of the sources that the settings name; returns their fingerprints."""
    files: dict[str, Any] = {}
    sources = (("train", settings.data.train), ("validation", settings.data.validation))
    for part, source in sources:
        if source is None:
            continue
        prepared = prepare(
            source,
            folder / f"{part}.bin",
            None if vocabulary is None else vocabulary.tokenizer,
            separator=None if vocabulary is None else vocabulary.eos_id,
        )
        say(_tokens_line(part, prepared))
        if prepared.max_id >= vocab_size:
            raise TokenOutOfRange(prepared.max_id, vocab_size)
        files[part] = _fingerprint(prepared, folder)
    return files


def _write(record: dict[str, Any], folder: Path) -> None:
    atomic.write_bytes(folder / "corpus.json", (json.dumps(record, indent=1) + "\n").encode())


def _record(folder: Path) -> dict[str, Any]:
    """corpus.json, which was written by `make` and may be damaged since."""
    try:
        record = manifest.document(folder / "corpus.json")
        for known in record["files"].values():
            for key, kind in _KNOWN.items():
                if not isinstance(known[key], kind):
                    raise TypeError(f"{key} is {known[key]!r}")
        for key in ("eos", "pad", "tokenizer_sha256"):
            if not isinstance(record[key], str | None):
                raise TypeError(f"{key} is {record[key]!r}")
        if "train" not in record["files"]:
            raise KeyError("train")
    except (Serde, KeyError, TypeError, AttributeError) as error:
        raise InvalidDataset(
            f"{folder / 'corpus.json'} is damaged ({error}): put it back from a copy"
        ) from error
    return record


def _vocabulary(record: dict[str, Any], folder: Path) -> Vocabulary | None:
    if record["eos"] is None:
        return None
    vocabulary = Vocabulary.open(folder / "tokenizer.json", record["eos"], record["pad"])
    if vocabulary.sha256 != record["tokenizer_sha256"]:
        raise InvalidDataset(
            f"{vocabulary.path} is not the tokenizer that this run began with: its digest is "
            f"{vocabulary.sha256}, and was {record['tokenizer_sha256']}"
        )
    return vocabulary


def open_corpus(settings: Settings, folder: Path) -> Corpus:
    """Open what `make` left in `folder`, split into training and held-out tokens.

    Raises:
        InvalidDataset: a file is not the one that was made, or too short for a window.
    """
    record = _record(folder)
    vocabulary = _vocabulary(record, folder)
    paths = {part: folder / known["path"] for part, known in record["files"].items()}
    for part, known in record["files"].items():
        _require_same(paths[part], known)
    seed, seq_len = settings.train.seed, settings.data.seq_len
    tokens = record["files"]["train"]["tokens"]
    if "validation" in paths:
        held_tokens = record["files"]["validation"]["tokens"]
        first, last, end = 0, min(held_tokens, EVALUATION_TOKENS), tokens
        _require_windows(paths["validation"], held_tokens, seq_len, "held-out text needs one")
    else:
        # the last 5 %, and a window at least
        first = end = tokens - max(-(-tokens // 20), seq_len)
        last = min(tokens, first + EVALUATION_TOKENS)
    _require_windows(paths["train"], end, seq_len, "training needs one, beside what is held out")
    held_out = TokenFile.open(paths.get("validation", paths["train"]), seed, (first, last))
    density = None
    if vocabulary is not None:
        found = vocabulary.bytes_of(held_out.read(0, held_out.tokens()).tolist())
        density = found / held_out.tokens() if found else None
    return Corpus(
        train=TokenFile.open(paths["train"], seed, (0, end)),
        held_out=held_out,
        vocabulary=vocabulary,
        fingerprint=record["files"],
        replaced=record.get("replaced", []),
        bytes_per_token=density,
    )


def _tokens_line(part: str, prepared: Prepared) -> str:
    line = f"{part}: {prepared.tokens:,} tokens"
    if prepared.documents is not None:
        line += f" in {prepared.documents:,} document" + "s" * (prepared.documents != 1)
    if prepared.text_bytes:
        line += f", {prepared.text_bytes / prepared.tokens:.2f} bytes of text each"
    return line


def _fingerprint(prepared: Prepared, folder: Path) -> dict[str, Any]:
    inside = prepared.path.parent.resolve() == folder.resolve()
    return {
        # a run directory may be moved, a file outside it is where it is
        "path": prepared.path.name if inside else str(prepared.path.absolute()),
        "bytes": prepared.path.stat().st_size,
        "tokens": prepared.tokens,
        "max_id": prepared.max_id,
        "sha256": prepared.sha256,
        "blocks_sha256": _blocks_sha256(prepared.path),
    }


def _blocks_sha256(path: Path) -> str:
    """A digest of a file's head, middle and tail: quick on any size."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in (0, max(size // 2 - _BLOCK // 2, 0), max(size - _BLOCK, 0)):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _require_same(path: Path, known: dict[str, Any]) -> None:
    with atomic.io_errors("read", path):
        size = path.stat().st_size
        same = size == known["bytes"] and _blocks_sha256(path) == known["blocks_sha256"]
    if not same:
        raise InvalidDataset(
            f"{path} is not the file that this run began with: it had {known['bytes']} bytes "
            f"and has {size}, or its content differs; put the old one back, or go on with the new "
            "one by --override data.train=... (or data.validation=...)"
        )


def _require_windows(path: Path, tokens: int, seq_len: int, needed: str) -> None:
    if tokens < seq_len:
        raise InvalidDataset(
            f"{path} has {max(tokens, 0)} tokens for this, fewer than one window of data.seq_len "
            f"{seq_len}, and {needed}: give more text, or lower data.seq_len"
        )
