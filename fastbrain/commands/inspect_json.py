"""The JSON and TOML of runs and checkpoints: which one it is, by its keys, and what it says."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.commands import inspect_rows
from fastbrain.commands.inspect_finding import Finding, Unknown, clean, model_facts
from fastbrain.config import TransformerConfig
from fastbrain.errors import FastBrainError, Serde
from fastbrain.formats import strict_toml
from fastbrain.formats.header import config_from_object
from fastbrain.formats.strict_json import loads
from fastbrain.tokens.tokenizer import load_tokenizer
from fastbrain.training.settings import shape

# a document of one byte may take thirty once it is parsed
MAX_BYTES = 1 << 20
_MAX_TOKENIZER_BYTES = 64 << 20

_NAMES = {
    "MANIFEST.json": "the manifest of a checkpoint",
    "trainer_state.json": "the trainer's state in a checkpoint",
    "config.json": "the configuration of a model",
    "generation_config.json": "how a model generates text",
    "tokenizer.json": "a tokenizer",
    "tokenizer_config.json": "how a tokenizer is used",
    "corpus.json": "the record of a run's tokens",
}


def document(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be hostile.

    Raises:
        Io: it cannot be read.
        Serde: not an object, or more than any of these files holds.
    """
    found = _parsed(path, loads)
    if not isinstance(found, dict):
        raise Serde(f"{path} must hold an object, not {clean(str(found)[:200])}")
    return found


def described(path: Path, head: bytes) -> Finding:
    """What a file of JSON is.

    Raises:
        Unknown: no file of a run or model has its keys.
        Io: it cannot be read.
    """
    if path.suffix == ".jsonl" or _is_rows(head):
        return inspect_rows.rows(path)
    if path.name == "tokenizer.json" or b'"added_tokens"' in head or b'"truncation"' in head:
        return _tokenizer(path)
    try:
        found = document(path)
    except Serde as error:
        if path.name not in _NAMES and not path.name.endswith(".bin.json"):
            raise Unknown(f"text that begins like JSON and is not: {error}") from error
        what = _NAMES.get(path.name, "the record of a token file")
        return Finding(what).damaged(error)
    for keys, describe in _KINDS:
        if keys <= set(found):
            return describe(path, found)
    if path.name in _NAMES:
        return Finding(_NAMES[path.name]).damaged(
            f"{path} has none of the keys of such a file, but {_keys(found)}"
        )
    raise Unknown(f"a JSON object with the keys {_keys(found)}; no file of fastbrain's has them")


def settings(path: Path) -> Finding:
    """A configuration in TOML: of a run, or to begin one with.

    Raises:
        Unknown: it is not TOML, nor named so.
        Io: it cannot be read.
    """
    finding = Finding("a configuration to train with (TOML)")
    try:
        tables = _parsed(path, strict_toml.loads)
    except Serde as error:
        if path.suffix != ".toml":
            raise Unknown(f"text, which is not TOML either: {error}") from error
        return finding.damaged(error)
    named = [each for each, value in tables.items() if isinstance(value, dict)]
    if path.suffix != ".toml" and not {"model", "data", "train"} & set(named):
        raise Unknown("text, or TOML without a setting of fastbrain's")
    finding.facts = {"tables": named}
    finding.whole, finding.checked = None, "TOML has no checksum"
    if "run_id" in tables:
        finding.what = "the configuration of a run (config.toml)"
        if isinstance(tables["run_id"], str):
            finding.facts = {"run id": tables["run_id"], **finding.facts}
    finding.facts |= shape_of(tables, finding)
    return finding


def shape_of(tables: Mapping[str, Any], finding: Finding) -> dict[str, Any]:
    """Facts of the [model] of a configuration; what keeps it from being one is noted."""
    model = tables.get("model")
    if not isinstance(model, dict):
        return {}
    try:
        return model_facts(shape(model))
    except (ValueError, TypeError) as error:  # the plain one for a number of thousands of digits
        finding.notes.append(f"its [model] alone does not make a shape: {clean(str(error))}")
        return {}


def model_config(found: Mapping[str, Any]) -> TransformerConfig | None:
    """The configuration that a config.json carries under `fastbrain`; None where it has none.

    Raises:
        Serde, InvalidConfig: it has one that is not valid.
    """
    return config_from_object(found["fastbrain"]) if "fastbrain" in found else None


def _parsed(path: Path, parse: Callable[[bytes], Any]) -> Any:
    with atomic.io_errors("read", path), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Serde(f"{path} has more than {MAX_BYTES} bytes, which no such file has")
    try:
        return parse(data)
    except FastBrainError as error:
        raise Serde(f"{path}: {error}") from error


def _is_rows(head: bytes) -> bool:
    first, newline, _ = head.partition(b"\n")
    if not newline:
        return False
    try:
        row = loads(first)
    except Serde:
        return False
    return isinstance(row, dict) and "self" not in row and "format" not in row


def _keys(found: Mapping[str, Any]) -> str:
    return clean(", ".join(list(found)[:8])) or "of nothing: it is empty"


def _tokenizer(path: Path) -> Finding:
    finding = Finding("a tokenizer (tokenizer.json of Hugging Face)")
    try:
        with atomic.io_errors("read", path):
            size = path.stat().st_size
        if size > _MAX_TOKENIZER_BYTES:
            raise Serde(f"{path} has {size} bytes, more than any tokenizer has")
        tokenizer = load_tokenizer(path)
    except FastBrainError as error:
        return finding.damaged(error)
    finding.whole, finding.checked = True, "being loaded; it has no checksum of its own"
    added = tokenizer.get_added_tokens_decoder()
    finding.facts = {
        "tokens": tokenizer.get_vocab_size(with_added_tokens=True),
        "kind": type(tokenizer.model).__name__,
        "special tokens": [clean(each.content) for each in added.values() if each.special][:20],
    }
    return finding


def _manifest(path: Path, found: dict[str, Any]) -> Finding:
    finding = Finding(_NAMES["MANIFEST.json"])
    recorded, files = found.pop("self"), found["files"]
    if not isinstance(files, dict):
        return finding.damaged(f"{path} does not list files, but holds {clean(str(files)[:200])}")
    canonical = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    sizes = [each.get("bytes") for each in files.values() if isinstance(each, dict)]
    finding.facts = {
        "step": found["step"],
        "run id": found["run_id"],
        "format version": found["format_version"],
        "files": len(files),
        "bytes listed": sum(each for each in sizes if type(each) is int),
    }
    finding.notes.append("the files it lists are compared by `fastbrain verify` on their directory")
    if hashlib.sha256(canonical).hexdigest() != recorded:
        return finding.damaged(f"{path} was changed after it was written")
    strange = [name for name in files if name != Path(name).name or name in ("", ".", "..")]
    if strange:
        return finding.damaged(f"{path} lists {clean(strange[0])}, which is not a plain file name")
    finding.whole, finding.checked = True, "the SHA-256 that it holds of itself"
    return finding


def _trainer_state(path: Path, found: dict[str, Any]) -> Finding:
    finding = Finding(_NAMES["trainer_state.json"])
    for key in ("step", "updates", "tokens_seen", "optimizer", "val_loss", "best", "run_id"):
        if key in found:
            finding.facts[key.replace("_", " ")] = found[key]
    for key in ("micro_batch_size", "world_size", "threads", "versions"):
        if key in found:
            finding.facts[key.replace("_", " ")] = found[key]
    canonical = json.dumps(found["config"], sort_keys=True, separators=(",", ":")).encode()
    if hashlib.sha256(canonical).hexdigest() != found.get("config_sha256"):
        return finding.damaged(f"{path} holds settings that are not those of its config_sha256")
    finding.checked = "nothing of it has a checksum but the settings, which agree with theirs"
    return finding


def _model(path: Path, found: dict[str, Any]) -> Finding:
    finding = Finding(_NAMES["config.json"], checked="it has no checksum")
    finding.facts = {"model type": found.get("model_type"), "precision": found.get("dtype")}
    try:
        config = model_config(found)
    except FastBrainError as error:
        return finding.damaged(f"{path}: {error}")
    if config is None:
        finding.notes.append("it was not written by fastbrain: no key of that name")
        return finding
    finding.facts |= model_facts(config)
    return finding


def _corpus(path: Path, found: dict[str, Any]) -> Finding:
    finding = Finding(_NAMES["corpus.json"], checked="it has no checksum")
    files = found["files"]
    for part, known in files.items() if isinstance(files, dict) else [("", None)]:
        keys = ("path", "tokens", "max_id", "sha256")
        if not isinstance(known, dict) or any(key not in known for key in keys):
            return finding.damaged(f"{path}: files.{clean(part)} lacks one of {', '.join(keys)}")
        finding.facts[clean(part)] = {key: known[key] for key in keys}
    finding.facts |= {"ends a text": found["eos"], "tokenizer sha256": found["tokenizer_sha256"]}
    return finding


def _sidecar(path: Path, found: dict[str, Any]) -> Finding:
    finding = Finding("the record beside a token file", checked="it has no checksum")
    for key in ("tokens", "max_id", "sha256", "documents", "skipped", "text_bytes"):
        if key in found:
            finding.facts[key.replace("_", " ")] = found[key]
    return finding


def _generation(path: Path, found: dict[str, Any]) -> Finding:
    return Finding(_NAMES["generation_config.json"], checked="it has no checksum", facts=found)


def _tokenizer_config(path: Path, found: dict[str, Any]) -> Finding:
    keys = ("tokenizer_class", "eos_token", "pad_token", "model_max_length")
    facts = {key.replace("_", " "): found[key] for key in keys if key in found}
    return Finding(_NAMES["tokenizer_config.json"], checked="it has no checksum", facts=facts)


# the keys that tell a file, the most telling first
_KINDS: list[tuple[set[str], Callable[[Path, dict[str, Any]], Finding]]] = [
    ({"self", "files", "step", "run_id", "format_version"}, _manifest),
    ({"step", "updates", "config", "run_id"}, _trainer_state),
    ({"eos", "pad", "files", "tokenizer_sha256"}, _corpus),
    ({"format", "tokens", "max_id", "sha256"}, _sidecar),
    ({"tokenizer_class"}, _tokenizer_config),
    ({"model_type"}, _model),
    ({"eos_token_id", "pad_token_id"}, _generation),
]
