"""A private copy of everything that a checkpoint holds, and the files that it becomes.

It is taken between two steps and belongs to nobody else, so that the model may train on while a
thread writes it. Everything is safetensors or JSON. Rate, rows and bias correction follow from the
step and the settings, so there is no generator and no scheduler to save.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbrain import atomic
from fastbrain.errors import FastBrainError
from fastbrain.formats import huggingface
from fastbrain.formats.safetensors_file import pieces
from fastbrain.lm import TransformerLm
from fastbrain.parallel.ranks import Ranks
from fastbrain.parallel.shards import whole
from fastbrain.training.corpus import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.environment import environment
from fastbrain.training.manifest import FORMAT_VERSION
from fastbrain.training.settings import Settings
from fastbrain.training.space import require_space
from fastbrain.training.state import State
from fastbrain.transformer import Piece, pieces_of_parameters

# which file a kind of tensor is in, and how its names end there
_PLACES = {
    "weight": ("model.safetensors", ""),
    "moment1": ("optimizer.safetensors", ".moment1"),
    "moment2": ("optimizer.safetensors", ".moment2"),
}
# values looked at together: they stay in the cache, and NumPy lets other threads run
_BLOCK = 1 << 20


class NotFinite(FastBrainError):
    """The model holds NaN or infinity, and is not worth keeping."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of `step` holds: tensors by file and name, and the other files' bytes."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, bytes]

    def write(self, directory: Path) -> dict[str, atomic.Written]:
        """Fill an empty directory, every file flushed.

        Raises:
            NotFinite: a weight or moment is not a finite number.
            Io: a file cannot be written, or the disk has less space than all of them need.
        """
        size = sum(t.nbytes for tensors in self.tensors.values() for t in tensors.values())
        require_space(directory, size, "a checkpoint needs")
        written = {}
        for name, tensors in self.tensors.items():
            for key, tensor in tensors.items():
                _require_finite(key, tensor)
            written[name] = atomic.write_new(directory / name, pieces(tensors))
        for name, content in self.documents.items():
            written[name] = atomic.write_new(directory / name, [content])
        return written


class Camera:
    """Takes snapshots of one model, into host memory that is allocated once: 12 bytes a parameter.

    A snapshot is good until the next one is taken. Of several ranks the first takes it, and where
    the model is in parts all have to help.
    """

    def __init__(
        self,
        model: TransformerLm,
        corpus: Corpus,
        device: Device,
        run_id: str,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks.alone()
        self._held = pieces_of_parameters(model.config)
        self._model = model
        self._corpus = corpus
        self._device = device
        self._run_id = run_id
        self._host: dict[str, dict[str, Tensor]] = {}
        # read once: a file that vanishes from the run must not end it at its next save
        self._documents = _model_documents(model, corpus)

    def take(self, settings: Settings, state: State) -> Snapshot | None:
        """Copy the model, its moments and the counters as they are now; None on other ranks."""
        leads, updates = self._ranks.leads, self._model.optimizer_step()
        if not leads and not self._model.sharded:
            return None
        for kind, tensors in self._model.tensors().items():
            for parameter, tensor in tensors.items():
                # one at a time: nobody has room for all of them twice
                values = whole(tensor)
                if leads:
                    self._keep(*placed(self._held[parameter], kind, values))
        if not leads:
            return None
        self._keep("optimizer.safetensors", {"updates": torch.tensor(updates)})
        own = huggingface.json_bytes(self._trainer_state(settings, state, updates))
        return Snapshot(state.step, self._host, self._documents | {"trainer_state.json": own})

    def _keep(self, file: str, views: Mapping[str, Tensor]) -> None:
        kept = self._host.setdefault(file, {})
        for name, view in views.items():
            if name not in kept:
                kept[name] = torch.empty(view.shape, dtype=view.dtype)
            kept[name].copy_(view)

    def _trainer_state(self, settings: Settings, state: State, updates: int) -> dict[str, Any]:
        tables = settings.tables()
        canonical = json.dumps(tables, sort_keys=True, separators=(",", ":"))
        best = {"step": state.best_step, "val_loss": state.best_loss}
        vocabulary = self._corpus.vocabulary
        finite = state.val_loss is not None and math.isfinite(state.val_loss)
        return {
            "format_version": FORMAT_VERSION,
            "run_id": self._run_id,
            "step": state.step,
            "updates": updates,
            "tokens_seen": state.step * settings.step_tokens,
            "config": tables,
            "config_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
            "optimizer": type(self._model.optimizer).__name__,
            "guard": state.guard.document(),
            "val_loss": state.val_loss if finite else None,
            "best": None if state.best_step is None else best,
            "data": self._corpus.fingerprint,
            "tokenizer_sha256": None if vocabulary is None else vocabulary.sha256,
            **environment(self._device, settings, self._ranks.size, self._model.parallel),
        }


def placed(held: Iterable[Piece], kind: str, tensor: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Where a checkpoint has what one parameter holds: the file, and views by their names there.

    Args:
        held: the pieces of the parameter.
        kind: of `DistributedModel.tensors`.
        tensor: its weights, or a moment of them, whole.
    """
    file, end = _PLACES[kind]
    views = huggingface.stored((piece.name, piece.view(tensor)) for piece in held)
    return file, {name + end: view for name, view in views.items()}


def moments(model: TransformerLm) -> dict[str, Tensor]:
    """The optimizer's moments under their names in a checkpoint; writing to them writes it."""
    held, tensors = pieces_of_parameters(model.config), model.tensors()
    found: dict[str, Tensor] = {}
    for kind in ("moment1", "moment2"):
        for parameter, tensor in tensors[kind].items():
            found |= placed(held[parameter], kind, tensor)[1]
    return found


def _model_documents(model: TransformerLm, corpus: Corpus) -> dict[str, bytes]:
    config, words = model.config, corpus.vocabulary
    files = None if words is None else words.files
    found = huggingface.documents(huggingface.config_json(config), files, config.max_seq_len)
    if words is not None:
        # to the byte the one of the run, whichever version of the package wrote that
        found["tokenizer.json"] = words.path.read_bytes()
    return found


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        return
    values = tensor.reshape(-1).numpy()
    for first in range(0, values.size, _BLOCK):
        if not np.isfinite(values[first : first + _BLOCK]).all():
            raise NotFinite(f"{name} holds values that are not finite numbers; nothing was saved")
