"""Directories: of a run, of a checkpoint, of a model."""

import os
from pathlib import Path
from typing import Any

from fastbrain.commands import inspect_json, inspect_rows, inspect_tensors, verify_items
from fastbrain.commands.inspect_finding import Finding, Unknown
from fastbrain.errors import FastBrainError
from fastbrain.training import manifest, run_dir
from fastbrain.training.run_dir import RunDir

_HASHED = "the size and SHA-256 of each of its files"


def described(path: Path) -> Finding:
    """What a directory is.

    Raises:
        Unknown: nothing that fastbrain writes or reads.
        FastBrainError: it looks like a run and cannot be read as one.
    """
    if run_dir.exists(path):
        return _run(path)
    if (path / manifest.NAME).is_file():
        return _checkpoint(path)
    if (path / "config.json").is_file():
        return _model(path)
    raise Unknown("a directory that is no run, no checkpoint and no model")


def _run(path: Path) -> Finding:
    run = RunDir.open(path)
    finding = Finding("the directory of a run", bytes=_size(path))
    finding.facts = {"run id": run.run_id, **inspect_json.shape_of(run.tables, finding)}
    train = run.tables.get("train")
    if isinstance(train, dict) and isinstance(train.get("precision"), str):
        finding.facts["precision"] = train["precision"]
    if (path / "checkpoints").is_dir():
        finding.facts["checkpoints"] = [each.step for each in reversed(run.checkpoints())]
    if run.metrics.is_file():
        rows = inspect_rows.scan(run.metrics)
        finding.facts["step"] = 0 if rows.steps is None else rows.steps[1]
        finding.facts |= inspect_rows.last_facts(rows)
    if finding.fault is None:
        _judge(finding, run)
    return finding


def _judge(finding: Finding, run: RunDir) -> None:
    _, checks = verify_items.of(run.path)
    newest = next((item for check in checks[:1] if (item := check()).step is not None), None)
    if newest is None:
        finding.checked = "it has no checkpoint yet"
    elif newest.state == "damaged":
        finding.damaged(f"{newest.name}, its newest checkpoint, is {newest.words}")
    elif newest.state == "intact":
        finding.whole = True
        finding.checked = f"its newest checkpoint alone, {newest.name}: {_HASHED}"
        finding.notes.append("`fastbrain verify` compares the other checkpoints and the tokens too")
    else:
        finding.checked = newest.words


def _checkpoint(path: Path) -> Finding:
    finding = Finding("a checkpoint of a run", bytes=_size(path))
    [item] = [check() for check in verify_items.of(path)[1]]
    state = _facts_of(path / "trainer_state.json")
    for key in ("run id", "step", "updates", "tokens seen", "val loss", "optimizer", "best"):
        if key in state:
            finding.facts[key] = state[key]
    _add_model(path, finding)
    if item.state == "damaged":
        finding.damaged(item.words.removeprefix("damaged: "))
    elif item.state == "intact":
        finding.whole, finding.checked = True, _HASHED
    else:
        finding.checked = item.words
    return finding


def _model(path: Path) -> Finding:
    finding = Finding("a model as Hugging Face keeps it", bytes=_size(path))
    finding.checked = "there is no record of what its files were"
    finding.facts = dict(_facts_of(path / "config.json"))
    _add_model(path, finding)
    return finding


def _add_model(path: Path, finding: Finding) -> None:
    """Shape and tensors of the weights in a directory."""
    shape = _facts_of(path / "config.json")
    for key in ("model", "parameters", "shape"):
        if key in shape:
            finding.facts[key] = shape[key]
    for file in sorted(path.glob("model*.safetensors")):
        if not file.is_file():
            continue
        weights = inspect_tensors.safetensors(file)
        if weights.fault is not None:
            finding.damaged(weights.fault)
            continue
        finding.tensors = [*finding.tensors, *weights.tensors]
        finding.facts["precision"] = weights.facts["precision"]
        if "parameters" not in shape:
            total = finding.facts.get("parameters", {}).get("total", 0)
            finding.facts["parameters"] = {"total": total + weights.facts["parameters"]["total"]}
    finding.facts["tensor count"] = len(finding.tensors)


def _facts_of(path: Path) -> dict[str, Any]:
    try:
        return inspect_json.described(path, b"").facts
    except FastBrainError:
        return {}


def _size(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            # a trainer may delete what has just been listed
            try:
                total += os.lstat(Path(folder, name)).st_size
            except OSError:
                continue
    return total
