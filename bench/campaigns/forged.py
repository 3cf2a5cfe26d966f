"""Manifests changed by hand: carelessly, and by someone who makes `self` anew."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.campaigns.trial import CORRUPT, FOREIGN, MANIFEST, NEWER, Trial

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]

_MODEL = "model.safetensors"


def edits(directory: Path) -> Iterator[Trial]:
    """Every manifest of a checkpoint that must not be taken for the true one."""
    truth: Manifest = json.loads((directory / MANIFEST).read_bytes())
    yield from _careless(truth)
    yield from _consistent(truth)
    yield from _hostile_names()
    yield from _other_documents(directory)
    yield from _state(truth)


def _careless(truth: Manifest) -> Iterator[Trial]:
    kind = "a manifest edited, self left"
    for change in (
        _set("step", truth["step"] - 1),
        _set("run_id", "0" * 32),
        _set("format_version", 0),
        _set("self", "0" * 64),
        lambda found: found.pop("self"),
        _set("more", 1),
        *(_entry(name, "bytes", each["bytes"] + 1) for name, each in truth["files"].items()),
        *(_entry(name, "sha256", "0" * 64) for name in truth["files"]),
        *(_drop(name) for name in truth["files"]),
    ):
        yield Trial(kind, MANIFEST, _edited(change, fresh=False))


def _consistent(truth: Manifest) -> Iterator[Trial]:
    kind = "a manifest edited, self made anew"
    for key, value in (
        ("step", truth["step"] - 1), ("step", str(truth["step"])), ("step", True), ("step", None),
        ("step", float(truth["step"])), ("files", []), ("files", {}), ("files", None),
    ):  # fmt: skip
        yield Trial(kind, MANIFEST, _edited(_set(key, value)))
    for key in ("step", "run_id", "files"):
        yield Trial(kind, MANIFEST, _edited(lambda found, key=key: found.pop(key)))
    for name, each in truth["files"].items():
        yield Trial(kind, name, _edited(_entry(name, "bytes", each["bytes"] - 1)))
        yield Trial(kind, name, _edited(_entry(name, "sha256", _other(each["sha256"]))))
        yield Trial(kind, name, _edited(_drop(name)))
        for key, value in (
            ("bytes", str(each["bytes"])), ("bytes", float(each["bytes"])), ("bytes", None),
            ("sha256", None), ("sha256", 0),
        ):  # fmt: skip
            yield Trial(kind, MANIFEST, _edited(_entry(name, key, value)))
    ghost = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    yield Trial(
        kind, "ghost.bin", _edited(lambda found: found["files"].update({"ghost.bin": ghost}))
    )
    kind = "another run's id, self made anew"
    yield Trial(kind, MANIFEST, _edited(_set("run_id", "0" * 32)), FOREIGN)
    kind = "a newer format, self made anew"
    yield Trial(kind, "format 1000", _edited(_set("format_version", 1000)), NEWER)


def _hostile_names() -> Iterator[Trial]:
    """The entry of the model under names that lead elsewhere."""
    for name, said in (
        ("../model.safetensors", MANIFEST), ("../../config.toml", MANIFEST),
        ("/etc/passwd", MANIFEST), ("a/model.safetensors", MANIFEST), (".", MANIFEST),
        ("..\\model.safetensors", MANIFEST), ("model.safetensors/", MANIFEST),
        (MANIFEST, MANIFEST), ("..", ""), ("", ""),
    ):  # fmt: skip

        def change(found: Manifest, name: str = name) -> None:
            found["files"][name] = found["files"][_MODEL]

        yield Trial("a listed name that leads elsewhere", said, _edited(change))


def _other_documents(directory: Path) -> Iterator[Trial]:
    text = (directory / MANIFEST).read_bytes()
    step = json.dumps(json.loads(text)["step"]).encode()
    twice = text.replace(b"{", b'{"step": 1,', 1)
    last = text.rstrip()[:-1] + b', "step": ' + step + b"}"
    files = text.replace(b'"files": {', b'"files": {}, "files": {', 1)
    for content in (twice, last, files):
        yield Trial("a key twice in the manifest", MANIFEST, _content(content))
    strange = text.replace(b"{", b'{"a": NaN,', 1)
    for content in (
        b"null", b"[]", b"{}", b"7", b'""', b"NaN", b"[" * 100_000, b"{" * 100_000, b"\xff\xfe{}",
        b" " * (20 << 20), b"\xef\xbb\xbf" + text, text + text, strange,
    ):  # fmt: skip
        yield Trial("another document as manifest", MANIFEST, _content(content))


def _state(truth: Manifest) -> Iterator[Trial]:
    """Contents that the manifest agrees with, and that are not of this step."""
    kind, name = "trainer_state.json forged, manifest made anew", "trainer_state.json"
    for content in (b"{}", b"[]", b"", b"{", json.dumps({"step": truth["step"] - 1}).encode()):

        def act(at: Path, content: bytes = content) -> None:
            (at / name).write_bytes(content)
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            _edited(lambda found: found["files"].update({name: entry}))(at)

        yield Trial(kind, name, act, CORRUPT)


def _set(key: str, value: object) -> Change:
    return lambda found: found.update({key: value})


def _entry(name: str, key: str, value: object) -> Change:
    return lambda found: found["files"][name].update({key: value})


def _drop(name: str) -> Change:
    return lambda found: found["files"].pop(name)


def _other(digest: str) -> str:
    return ("1" if digest[0] == "0" else "0") + digest[1:]


def _content(content: bytes) -> Callable[[Path], object]:
    return lambda at: (at / MANIFEST).write_bytes(content)


def _edited(change: Change, fresh: bool = True) -> Callable[[Path], object]:
    def act(at: Path) -> None:
        found = json.loads((at / MANIFEST).read_bytes())
        change(found)
        if fresh:
            found.pop("self", None)
            found["self"] = _digest(found)
        (at / MANIFEST).write_text(json.dumps(found, indent=1))

    return act


def _digest(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
