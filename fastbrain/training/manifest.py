"""MANIFEST.json of a checkpoint: what every file in it must be, and whether it still is.

A safetensors file tells nothing of a flipped bit in its data; the manifest holds the size and
SHA-256 of every file, and of itself, and says which run and step the directory belongs to.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import FastBrainError, InvalidSnapshot, Io, Serde
from fastbrain.formats import strict_json

NAME = "MANIFEST.json"
FORMAT_VERSION = 1

REQUIRED = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")

# what some loader would pick up by itself, so that it may not lie there unlisted
_LOADABLE = {".safetensors", ".bin", ".pt", ".json", ".jinja"}

# far more than any of ours has; what is larger is not parsed
_MOST_BYTES = 1 << 20


def write(directory: Path, run_id: str, step: int, files: Mapping[str, atomic.Written]) -> None:
    """Write the manifest of a finished checkpoint directory, and flush both.

    Args:
        directory: holds these files, flushed, and no others.
        run_id, step: what the checkpoint is of.
        files: size and digest by name, as they were written.
    """
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "step": step,
        "files": {name: files[name]._asdict() for name in sorted(files)},
    }
    manifest["self"] = _digest(manifest)
    atomic.write_new(directory / NAME, [json.dumps(manifest, indent=1).encode()])
    with atomic.io_errors("write", directory):
        atomic.sync_dir(directory)


def fault(directory: Path, run_id: str, step: int) -> str | None:
    """Why a checkpoint directory is not what was written there; None when it is.

    Reads every byte of it.

    Raises:
        InvalidSnapshot: a newer fastbrain wrote it, which is not damage.
    """
    try:
        manifest = _sound(directory)
        if manifest["step"] != step:
            return f"{NAME} is of step {manifest['step']}"
        if manifest["run_id"] != run_id:
            return f"{NAME} is of another run ({manifest['run_id']})"
        files = manifest["files"]
        for path in directory.iterdir():
            if path.name not in files and path.name != NAME and path.suffix in _LOADABLE:
                return f"{path.name} is not in {NAME}"
        # sizes first: they cost nothing, and say of most damage what it is
        for name, expected in files.items():
            if reason := _size_fault(directory / name, expected):
                return reason
        for name, expected in files.items():
            if atomic.sha256_of(directory / name) != expected["sha256"]:
                return f"{name} was changed after it was written"
        state = document(directory / "trainer_state.json")
    except (_Damage, Io, Serde) as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if _newer(state):
        raise _too_new(directory / "trainer_state.json", state)
    return (
        None if state.get("step") == step else f"trainer_state.json is of step {state.get('step')}"
    )


def owner(directory: Path) -> str | None:
    """The id of the run that a checkpoint directory belongs to; None where nothing sound says."""
    try:
        return str(_sound(directory)["run_id"])
    except (FastBrainError, _Damage, OSError):
        return None


def document(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be damaged.

    Raises:
        Io: the file cannot be read.
        Serde: it is not a JSON object, or larger than any that fastbrain writes.
    """
    with atomic.io_errors("read", path):
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise Serde(f"{path.name} has {size} bytes, more than the {_MOST_BYTES} allowed")
        content = path.read_bytes()
    try:
        found = strict_json.loads(content)
    except Serde as error:
        raise Serde(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Serde(f"{path.name} must hold an object, not {strict_json.short(found)}")
    return found


class _Damage(Exception):
    """Says what is wrong with a manifest."""


def _sound(directory: Path) -> dict[str, Any]:
    """A manifest without its `self`, which agrees with it; every entry has the right kind."""
    path = directory / NAME
    if not path.is_file():
        raise _Damage(f"it has no {NAME}")
    manifest = document(path)
    if manifest.pop("self", None) != _digest(manifest):
        raise _Damage(f"{NAME} was changed after it was written")
    # after the digest: a flipped bit can make a newer version of this one's number
    if _newer(manifest):
        raise _too_new(directory, manifest)
    files, step = manifest.get("files"), manifest.get("step")
    if (
        not isinstance(files, dict)
        or not all(map(_is_entry, files, files.values()))
        or type(step) is not int
        or "run_id" not in manifest
    ):
        raise _Damage(f"{NAME} is not one that fastbrain wrote")
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        raise _Damage(f"{NAME} does not list {missing[0]}")
    return manifest


def _is_entry(name: str, expected: object) -> bool:
    return (
        Path(name).name == name
        and "\\" not in name
        and name not in ("", "..", NAME)
        and isinstance(expected, dict)
        and type(expected.get("bytes")) is int
        and isinstance(expected.get("sha256"), str)
    )


def _size_fault(path: Path, expected: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        return f"{path.name} has {size} bytes and should have {expected['bytes']}"
    return None


def _newer(found: Mapping[str, Any]) -> bool:
    version = found.get("format_version")
    return type(version) is int and version > FORMAT_VERSION


def _too_new(path: Path, found: Mapping[str, Any]) -> InvalidSnapshot:
    return InvalidSnapshot(
        f"{path} is of format {found['format_version']}, newer than this fastbrain's "
        f"{FORMAT_VERSION}; resume it with the fastbrain that wrote it, or a newer one"
    )


def _digest(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
