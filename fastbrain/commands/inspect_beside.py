"""What other files say a file should be: the manifest, the run's record, a token file's own."""

from pathlib import Path
from typing import Any, NamedTuple

from fastbrain import atomic
from fastbrain.commands import inspect_json
from fastbrain.commands.inspect_finding import Finding, model_facts
from fastbrain.errors import FastBrainError
from fastbrain.tokens import sidecar
from fastbrain.training import manifest


class Record(NamedTuple):
    """What the file `source` says of another: its size and SHA-256, and where known its tokens."""

    source: str
    bytes: int
    sha256: str
    tokens: int | None = None
    max_id: int | None = None


def record(path: Path) -> Record | None:
    """What the files beside `path` say it should be; None where none of them names it."""
    for source, known in (
        (manifest.NAME, _listed(path, manifest.NAME)),
        ("corpus.json", _listed(path, "corpus.json")),
        (sidecar.beside(path).name, _of_sidecar(path)),
    ):
        if isinstance(known, dict) and _is_record(known):
            tokens, max_id = known.get("tokens"), known.get("max_id")
            return Record(source, known["bytes"], known["sha256"], tokens, max_id)
    return None


def compare(path: Path, finding: Finding) -> None:
    """Compare a file that seems whole with the record of it, if there is one; reads all of it."""
    known = record(path)
    if known is None or finding.whole is False:
        return
    if finding.bytes != known.bytes:
        finding.damaged(
            f"{path} has {finding.bytes} bytes, and {known.source} beside it says {known.bytes}"
        )
    elif finding.facts.get("sha256", "") != known.sha256 and (
        "sha256" in finding.facts or atomic.sha256_of(path) != known.sha256
    ):
        finding.damaged(f"{path} has another SHA-256 than {known.source} beside it says")
    else:
        finding.whole, finding.checked = True, f"its size and SHA-256, which {known.source} tells"


def add_model(path: Path, finding: Finding) -> None:
    """Parameter counts and shape, from the config.json beside a file of tensors."""
    try:
        config = inspect_json.model_config(inspect_json.document(path.parent / "config.json"))
    except FastBrainError:
        return
    if config is not None:
        finding.facts = {**model_facts(config), **_others(finding)}
        finding.notes.append("the model's shape is that of config.json beside it")


def _others(finding: Finding) -> dict[str, Any]:
    return {label: value for label, value in finding.facts.items() if label != "parameters"}


def _listed(path: Path, name: str) -> object:
    try:
        files = inspect_json.document(path.parent / name).get("files")
    except FastBrainError:
        return None
    if not isinstance(files, dict):
        return None
    if name == manifest.NAME:
        return files.get(path.name)
    named = (each for each in files.values() if isinstance(each, dict))
    return next((each for each in named if each.get("path") == path.name), None)


def _of_sidecar(path: Path) -> object:
    try:
        found = inspect_json.document(sidecar.beside(path))
    except FastBrainError:
        return None
    file = found.get("file")
    return found | {"bytes": file.get("bytes")} if isinstance(file, dict) else None


def _is_record(known: dict[str, Any]) -> bool:
    return type(known.get("bytes")) is int and isinstance(known.get("sha256"), str)
