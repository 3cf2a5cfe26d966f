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
from fastbrain.errors import InvalidSnapshot, Io

NAME = "MANIFEST.json"
FORMAT_VERSION = 1

REQUIRED = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")

# what some loader would pick up by itself, so that it may not lie there unlisted
_LOADABLE = {".safetensors", ".bin", ".pt", ".json", ".jinja"}


def write(directory: Path, run_id: str, step: int) -> None:
    """List every file of a finished checkpoint directory in its manifest, and flush both."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": atomic.sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "step": step,
        "files": files,
    }
    manifest["self"] = _digest(manifest)
    atomic.write_bytes(directory / NAME, json.dumps(manifest, indent=1).encode())
    atomic.sync_dir(directory)


def fault(directory: Path, run_id: str, step: int) -> str | None:
    """Why a checkpoint directory is not what was written there; None when it is.

    Reads every byte of it.

    Raises:
        InvalidSnapshot: a newer fastbrain wrote it, which is not damage.
    """
    try:
        manifest = json.loads((directory / NAME).read_bytes())
        recorded = manifest.pop("self")
        version, files = manifest["format_version"], manifest["files"]
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} cannot be read"
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InvalidSnapshot(
            f"{directory} is of format {version}, newer than this fastbrain's {FORMAT_VERSION}; "
            "resume it with the fastbrain that wrote it, or a newer one"
        )
    if recorded != _digest(manifest):
        return f"{NAME} was changed after it was written"
    if manifest["step"] != step:
        return f"{NAME} is of step {manifest['step']}"
    if manifest["run_id"] != run_id:
        return f"{NAME} is of another run ({manifest['run_id']})"
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        return f"{NAME} does not list {missing[0]}"
    for name, expected in files.items():
        if reason := _file_fault(directory / name, expected):
            return reason
    for path in directory.iterdir():
        if path.name not in files and path.name != NAME and path.suffix in _LOADABLE:
            return f"{path.name} is not in {NAME}"
    state = json.loads((directory / "trainer_state.json").read_bytes())
    return None if state["step"] == step else f"trainer_state.json is of step {state['step']}"


def _file_fault(path: Path, expected: Mapping[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return f"{path.name} is missing"
    if size != expected["bytes"]:
        return f"{path.name} has {size} bytes and should have {expected['bytes']}"
    try:
        same = atomic.sha256_of(path) == expected["sha256"]
    except Io as error:
        return str(error)
    return None if same else f"{path.name} was changed after it was written"


def _digest(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
