"""The files of one checkpoint: a model that transformers can read, and what training needs beside.

Everything is safetensors or JSON. Rate, rows and bias correction follow from the step and the
settings, so there is no generator and no scheduler to save.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbrain import atomic
from fastbrain.errors import FastBrainError, InvalidSnapshot
from fastbrain.formats import huggingface
from fastbrain.lm import TransformerLm
from fastbrain.training.data import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.manifest import FORMAT_VERSION
from fastbrain.training.settings import Settings
from fastbrain.training.state import State


class NotFinite(FastBrainError):
    """The model holds NaN or infinity, and is not worth keeping."""


def write(
    directory: Path,
    model: TransformerLm,
    corpus: Corpus,
    settings: Settings,
    state: State,
    device: Device,
    run_id: str,
) -> None:
    """Fill an empty directory with a checkpoint, every file flushed; the manifest is not of these.

    Raises:
        NotFinite: a weight or moment is not a finite number.
        Io: a file cannot be written.
    """
    weights = huggingface.stored(model.weights())
    moments = _moments(model)
    for name, tensor in (weights | moments).items():
        if not bool(torch.isfinite(tensor).all()):
            raise NotFinite(f"{name} holds values that are not finite numbers; nothing was saved")
    huggingface.write_tensors(directory / "model.safetensors", weights)
    updates = torch.tensor(int(model.optimizer_step()), dtype=torch.int64)
    huggingface.write_tensors(directory / "optimizer.safetensors", moments | {"updates": updates})
    words = corpus.vocabulary
    eos, pad = (None, None) if words is None else (words.eos_id, words.pad_id)
    config = huggingface.config_json(model.config, eos=eos, pad=pad)
    _write_json(directory / "config.json", config)
    generation = huggingface.generation_config_json(eos, pad)
    _write_json(directory / "generation_config.json", generation)
    if words is not None:
        atomic.write_bytes(directory / "tokenizer.json", words.path.read_bytes())
        tokenizer = huggingface.tokenizer_config_json(
            eos=words.eos, pad=words.pad, model_max_length=model.config.max_seq_len
        )
        _write_json(directory / "tokenizer_config.json", tokenizer)
    _write_json(
        directory / "trainer_state.json",
        _trainer_state(model, corpus, settings, state, device, run_id),
    )


def load(directory: Path, model: TransformerLm, corpus: Corpus, seed: int) -> State:
    """Read a checkpoint into a model of the same shape; its weights, moments and counters.

    Names, shapes and dtypes are compared before anything is written, and values are copied into
    the tensors that are there, one at a time.

    Raises:
        InvalidSnapshot: another shape, vocabulary, seed, optimizer or tokenizer; names both.
    """
    recorded = json.loads((directory / "trainer_state.json").read_bytes())
    _require_same("seed", recorded["config"]["train"]["seed"], seed)
    _require_same("optimizer", recorded["optimizer"], type(model.optimizer).__name__)
    _require_same("tokenizer (sha256)", recorded["tokenizer_sha256"], _tokenizer_sha256(corpus))
    _require_same("token file", recorded["data"], corpus.fingerprint)
    moments = _moments(model)
    updates = torch.zeros((), dtype=torch.int64)
    files = {
        "model.safetensors": huggingface.stored(model.weights()),
        "optimizer.safetensors": moments | {"updates": updates},
    }
    # both are compared before either is copied
    for name, views in files.items():
        huggingface.check_fits(directory / name, views)
    for name, views in files.items():
        huggingface.read_tensors(directory / name, views)
    model.set_optimizer_step(int(updates))
    best = recorded["best"]
    return State(
        step=recorded["step"],
        skipped=recorded["step"] - recorded["updates"],
        consecutive_skips=recorded["guard"]["consecutive_skips"],
        val_loss=recorded["val_loss"],
        best_loss=math.inf if best is None else best["val_loss"],
        best_step=None if best is None else best["step"],
    )


def differences_in_kind(directory: Path, device: Device, settings: Settings) -> list[str]:
    """What makes a resumed run differ in its last bits from the one that was interrupted."""
    recorded = json.loads((directory / "trainer_state.json").read_bytes())
    then = recorded["versions"] | {
        "threads": recorded["threads"],
        "micro-batch": recorded["micro_batch_size"],
    }
    now = _versions(device) | {
        "threads": torch.get_num_threads(),
        "micro-batch": settings.train.micro_batch_size,
    }
    return [f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]


def _moments(model: TransformerLm) -> dict[str, Tensor]:
    first = huggingface.stored((name, one) for name, one, _ in model.moments())
    second = huggingface.stored((name, two) for name, _, two in model.moments())
    return {f"{name}.moment1": tensor for name, tensor in first.items()} | {
        f"{name}.moment2": tensor for name, tensor in second.items()
    }


def _trainer_state(
    model: TransformerLm,
    corpus: Corpus,
    settings: Settings,
    state: State,
    device: Device,
    run_id: str,
) -> dict[str, Any]:
    tables = settings.tables()
    canonical = json.dumps(tables, sort_keys=True, separators=(",", ":"))
    best = {"step": state.best_step, "val_loss": state.best_loss}
    return {
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "step": state.step,
        "updates": int(model.optimizer_step()),
        "tokens_seen": state.step * settings.step_tokens,
        "config": tables,
        "config_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "optimizer": type(model.optimizer).__name__,
        "guard": {"consecutive_skips": state.consecutive_skips, "data_skips": [], "rollbacks": 0},
        "val_loss": state.val_loss,
        "best": None if state.best_step is None else best,
        "data": corpus.fingerprint,
        "tokenizer_sha256": _tokenizer_sha256(corpus),
        "versions": _versions(device),
        "threads": torch.get_num_threads(),
        "tile_table_sha256": None,
        "world_size": 1,
        "micro_batch_size": settings.train.micro_batch_size,
    }


def _tokenizer_sha256(corpus: Corpus) -> str | None:
    return None if corpus.vocabulary is None else corpus.vocabulary.sha256


def _versions(device: Device) -> dict[str, Any]:
    return {
        "fastbrain": metadata.version("fastbrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else None,
        "cuda": torch.version.cuda,
        "device": device.name,
    }


def _require_same(what: str, recorded: object, ours: object) -> None:
    if recorded != ours:
        raise InvalidSnapshot(
            f"the checkpoint was trained with another {what}: {_brief(recorded)} there, "
            f"{_brief(ours)} here; a run goes on with what it began with"
        )


def _brief(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic.write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())
