"""Going on from a checkpoint, or from the start: a model, its moments and its counters."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastbrain.errors import InvalidSnapshot
from fastbrain.formats import huggingface
from fastbrain.lm import TransformerLm
from fastbrain.parallel.shards import fill
from fastbrain.training import manifest
from fastbrain.training.corpus import Corpus
from fastbrain.training.guard import Guard
from fastbrain.training.initial import build, copy_weights
from fastbrain.training.run_dir import Checkpoint
from fastbrain.training.settings import Settings
from fastbrain.training.snapshot import placed
from fastbrain.training.state import State
from fastbrain.transformer import pieces_of_parameters


def restore(
    found: Checkpoint | None,
    model: TransformerLm,
    corpus: Corpus,
    settings: Settings,
    rollbacks: list[tuple[int, int]],
) -> State:
    """Put a model where a run stands: at a checkpoint, or at its fresh weights where there is none.

    Names, shapes and dtypes are compared before anything is written, and values are copied into
    the tensors that are there, one at a time.

    Args:
        found: an intact checkpoint of the run.
        model: of the run's shape; written to.
        corpus, settings: of the run.
        rollbacks: decided up to now, as of `guard_log.rollbacks`.

    Raises:
        InvalidSnapshot: another shape, vocabulary, seed, optimizer or tokenizer; names both.
    """
    policy = settings.guard.policy
    if found is None:
        copy_weights(build(settings), model)
        model.forget_moments()
        return State(guard=Guard(policy, data_skips=rollbacks))
    recorded = manifest.document(found.path / "trainer_state.json")
    try:
        _require_same_run(recorded, model, corpus, settings)
        best = recorded["best"]
        state = State(
            step=recorded["step"],
            skipped=recorded["step"] - recorded["updates"],
            val_loss=recorded["val_loss"],
            best_loss=math.inf if best is None else best["val_loss"],
            best_step=None if best is None else best["step"],
            guard=Guard.restored(policy, recorded["guard"], rollbacks),
        )
    except (KeyError, TypeError) as error:
        raise InvalidSnapshot(
            f"{found.path / 'trainer_state.json'} is not one that fastbrain wrote: {error!r}"
        ) from error
    _read(found, model)
    return state


def _read(found: Checkpoint, model: TransformerLm) -> None:
    """Fill a model from a checkpoint."""
    updates = torch.zeros((), dtype=torch.int64)
    held, tensors = pieces_of_parameters(model.config), model.tensors()
    expected: dict[str, dict[str, Tensor]] = {"optimizer.safetensors": {"updates": updates}}
    for kind, parameter, tensor in _each(tensors):
        shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        file, views = placed(held[parameter], kind, shape)
        expected.setdefault(file, {}).update(views)
    # both are compared before either is copied
    for file, views in expected.items():
        huggingface.check_fits(found.path / file, views)
    for kind, parameter, tensor in _each(tensors):
        # a rank that has but a part of it reads it whole, and keeps its part
        values = torch.empty(tensor.shape, dtype=tensor.dtype) if model.sharded else tensor
        file, views = placed(held[parameter], kind, values)
        huggingface.copy_tensors(found.path / file, views)
        if values is not tensor:
            fill(tensor, values)
    huggingface.copy_tensors(found.path / "optimizer.safetensors", {"updates": updates})
    model.set_optimizer_step(int(updates))


def _each(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    for kind, of_kind in tensors.items():
        for parameter, tensor in of_kind.items():
            yield kind, parameter, tensor


def _require_same_run(
    recorded: Mapping[str, Any], model: TransformerLm, corpus: Corpus, settings: Settings
) -> None:
    vocabulary = corpus.vocabulary
    digest = None if vocabulary is None else vocabulary.sha256
    _require_same("seed", recorded["config"]["train"]["seed"], settings.train.seed)
    _require_same("optimizer", recorded["optimizer"], type(model.optimizer).__name__)
    _require_same("tokenizer (sha256)", recorded["tokenizer_sha256"], digest)
    if recorded["data"] not in corpus.replaced:
        _require_same("token file", recorded["data"], corpus.fingerprint)


def _require_same(what: str, recorded: object, ours: object) -> None:
    if recorded != ours:
        raise InvalidSnapshot(
            f"the checkpoint was trained with another {what}: {_brief(recorded)} there, "
            f"{_brief(ours)} here; a run goes on with what it began with"
        )


def _brief(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
