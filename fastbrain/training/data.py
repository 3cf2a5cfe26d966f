"""The tokens of a run: made once, split into training and held-out, known by their fingerprint.

Text becomes `data/train.bin` in the run directory, so that a run needs nothing else to go on; a
token file is used where it lies. `data/corpus.json` says what they were, and a resumed run
compares: rows drawn from another file would be another run.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidDataset, Serde, TokenOutOfRange
from fastbrain.tokens.chat_template import ChatTemplate
from fastbrain.tokens.instructions import PreparedInstructions, prepare_instructions
from fastbrain.tokens.packed_file import PackedFile
from fastbrain.tokens.prepare import Prepared, prepare
from fastbrain.tokens.token_file import TokenFile
from fastbrain.tokens.tokenizer_files import TokenizerFiles, read_template
from fastbrain.training import manifest
from fastbrain.training.corpus import (
    EVALUATION_TOKENS,
    Corpus,
    InstructionCorpus,
    TextCorpus,
)
from fastbrain.training.settings import Settings
from fastbrain.training.vocabulary import Vocabulary, tokenizer_files

_BLOCK = 1 << 20
_TOKENS = re.compile(r"(train|validation)(-\d+)?\.(bin|packed)")

# what is known of a token file, and in which kind of value
_KNOWN = {"path": str, "bytes": int, "tokens": int, "max_id": int, "blocks_sha256": str}


def make(
    settings: Settings,
    folder: Path,
    say: Callable[[str], object],
    init: TokenizerFiles | None = None,
) -> int:
    """Tokenize what has to be into `folder`; returns the vocabulary that the model needs.

    Args:
        settings: of the run.
        folder: the run's own.
        say: takes lines.
        init: the tokenizer of the model that the run begins from, where it has one.

    Raises:
        InvalidConfig: a token file whose vocabulary nothing tells, or a model vocabulary smaller
            than the tokenizer's.
        FastBrainError: as `tokens.prepare`, `prepare_instructions` and `tokenizer_files`.
    """
    data = settings.data
    with atomic.io_errors("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = init
    if data.tokenizer is not None or (init is None and not data.train.endswith(".bin")):
        files = tokenizer_files(data.tokenizer, data.train)
    if files is not None and data.kind == "instructions":
        files = _instructed(files, data.template)
    vocabulary = None
    if files is not None:
        vocabulary = Vocabulary.keep(files, folder / "tokenizer.json")
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
        record = vocabulary.record()
    record["files"] = _prepare(settings, folder, vocabulary, named or size, say)
    _write(record, folder)
    return int(named or size)


def remake(settings: Settings, folder: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Make the token files anew in the middle of a run, with the tokenizer that it has.

    They lie beside the old ones until `keep` is given what this returns, so a run that is then
    refused is as it was. What the old ones were is remembered there: checkpoints made with them
    still belong to the run.

    Raises:
        FastBrainError: as `make`.
    """
    record = _record(folder)
    vocabulary = _vocabulary(record, folder)
    before, replaced = record["files"], record.get("replaced", [])
    size = int(settings.model["vocab_size"])
    made = _prepare(settings, folder, vocabulary, size, say, f"-{len(replaced) + 1}")
    if _content(made) != _content(before):
        record |= {"files": made, "replaced": [*replaced, before]}
    return record


def keep(record: dict[str, Any], folder: Path) -> None:
    """Make `record` that of the run, and delete the token files in `folder` that it lacks."""
    _write(record, folder)
    named = {known["path"] for known in record["files"].values()}
    for path in folder.iterdir():
        owner = path.name.removesuffix(".json")
        if _TOKENS.fullmatch(owner) and owner not in named:
            with atomic.io_errors("delete", path):
                path.unlink()


def _content(files: dict[str, Any]) -> dict[str, Any]:
    return {part: {**known, "path": None} for part, known in files.items()}


def _instructed(files: TokenizerFiles, template: str | None) -> TokenizerFiles:
    """A tokenizer with the chat template that instructions are rendered with, and its ends.

    Args:
        files: of the model; its own template is taken where there is one.
        template: the path of a Jinja file to take instead.

    Raises:
        InvalidConfig: the template cannot be parsed.
        Io, Serde: it cannot be read.
    """
    chat = ChatTemplate(files, None if template is None else read_template(Path(template)))
    return replace(files, chat_template=chat.template, ends=chat.end_ids)


def _prepare(
    settings: Settings,
    folder: Path,
    vocabulary: Vocabulary | None,
    vocab_size: int,
    say: Callable[[str], object],
    tag: str = "",
) -> dict[str, Any]:
    """Token files of the sources that the settings name; returns their fingerprints.

    `tag` tells the names of those in `folder` apart from the ones that were there before.
    """
    data = settings.data
    files: dict[str, Any] = {}
    for part, source in (("train", data.train), ("validation", data.validation)):
        if source is None:
            continue
        prepared: Prepared | PreparedInstructions
        if data.kind == "instructions":
            assert vocabulary is not None
            prepared = prepare_instructions(
                source,
                folder / f"{part}{tag}.packed",
                ChatTemplate(vocabulary.files),
                data.seq_len,
                skip_bad=data.skip_bad,
                show=say,
            )
        else:
            prepared = prepare(
                source,
                folder / f"{part}{tag}.bin",
                None if vocabulary is None else vocabulary.files.tokenizer,
                separator=None if vocabulary is None else vocabulary.files.eos_id,
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
        texts = {key: record[key] for key in ("eos", "pad", "tokenizer_sha256")}
        texts |= {key: record.get(key) for key in ("bos", "chat_template")}
        for key, value in texts.items():
            if not isinstance(value, str | None):
                raise TypeError(f"{key} is {value!r}")
        for key, item in (("ends", int), ("replaced", dict)):
            entries = record.get(key, [])
            if not isinstance(entries, list) or not all(type(each) is item for each in entries):
                raise TypeError(f"{key} is {entries!r}")
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
    vocabulary = Vocabulary.open(folder / "tokenizer.json", record)
    if vocabulary.sha256 != record["tokenizer_sha256"]:
        raise InvalidDataset(
            f"{vocabulary.path} is not the tokenizer that this run began with: its digest is "
            f"{vocabulary.sha256}, and was {record['tokenizer_sha256']}"
        )
    return vocabulary


def open_corpus(settings: Settings, folder: Path, record: dict[str, Any] | None = None) -> Corpus:
    """Open what is in `folder`, split into what is trained on and what is held out.

    Args:
        settings: of the run.
        folder: the run's own.
        record: of `remake`; what `make` or `keep` left when None.

    Raises:
        InvalidDataset: a file is not the one that was made, or too short for a row.
    """
    record = record or _record(folder)
    vocabulary = _vocabulary(record, folder)
    paths = {part: folder / known["path"] for part, known in record["files"].items()}
    for part, known in record["files"].items():
        _require_same(paths[part], known)
    common = {
        "vocabulary": vocabulary,
        "fingerprint": record["files"],
        "replaced": record.get("replaced", []),
        "seq_len": settings.data.seq_len,
    }
    if settings.data.kind == "instructions":
        return _instructions(settings, paths, common)
    return _text(settings, paths, record["files"], common)


def _text(
    settings: Settings, paths: dict[str, Path], files: dict[str, Any], common: dict[str, Any]
) -> TextCorpus:
    seed, seq_len = settings.train.seed, settings.data.seq_len
    tokens = files["train"]["tokens"]
    if "validation" in paths:
        held_tokens = files["validation"]["tokens"]
        first, last, end = 0, min(held_tokens, EVALUATION_TOKENS), tokens
        _require_windows(paths["validation"], held_tokens, seq_len, "held-out text needs one")
    else:
        # the last 5 %, and a window at least
        first = end = tokens - max(-(-tokens // 20), seq_len)
        last = min(tokens, first + EVALUATION_TOKENS)
    _require_windows(paths["train"], end, seq_len, "training needs one, beside what is held out")
    held_out = TokenFile.open(paths.get("validation", paths["train"]), seed, (first, last))
    density, vocabulary = None, common["vocabulary"]
    if vocabulary is not None:
        found = vocabulary.bytes_of(held_out.read(0, held_out.tokens()).tolist())
        density = found / held_out.tokens() if found else None
    train = TokenFile.open(paths["train"], seed, (0, end))
    return TextCorpus(**common, bytes_per_token=density, train=train, held_out=held_out)


def _instructions(
    settings: Settings, paths: dict[str, Path], common: dict[str, Any]
) -> InstructionCorpus:
    seed, seq_len = settings.train.seed, settings.data.seq_len

    def opened(part: str, span: tuple[int, int] | None = None) -> PackedFile:
        return PackedFile.open(paths[part], seq_len, seed, span)

    most = max(EVALUATION_TOKENS // seq_len, 1)
    if "validation" in paths:
        with opened("validation") as whole:
            rows = whole.rows()
        train, held_out = opened("train"), opened("validation", (0, min(rows, most)))
    else:
        # the last 5 %, and a row at least
        with opened("train") as whole:
            rows = whole.rows()
        end = rows - -(-rows // 20)
        if end < 1:
            raise InvalidDataset(
                f"{paths['train']} has one row of data.seq_len {seq_len} packed tokens, and "
                "training needs one beside what is held out: give more examples, data.validation, "
                "or a lower data.seq_len"
            )
        train, held_out = opened("train", (0, end)), opened("train", (end, min(rows, end + most)))
    return InstructionCorpus(**common, bytes_per_token=None, train=train, held_out=held_out)


def _tokens_line(part: str, prepared: Prepared) -> str:
    line = f"{part}: {prepared.tokens:,} tokens"
    if prepared.documents is not None:
        line += f" in {prepared.documents:,} document" + "s" * (prepared.documents != 1)
    if prepared.text_bytes:
        line += f", {prepared.text_bytes / prepared.tokens:.2f} bytes of text each"
    return line


def _fingerprint(prepared: Prepared | PreparedInstructions, folder: Path) -> dict[str, Any]:
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
