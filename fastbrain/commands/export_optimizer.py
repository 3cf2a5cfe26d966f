"""The optimizer of a checkpoint, put back into a model that was opened without it."""

from pathlib import Path

import torch

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.formats import huggingface
from fastbrain.optim import Optimizer
from fastbrain.training import manifest
from fastbrain.training.pretrained import CHECKPOINT, Pretrained
from fastbrain.training.settings import Settings
from fastbrain.training.snapshot import moments


def restore(opened: Pretrained) -> None:
    """Give a model the moments, the counter and the settings of the checkpoint it came from.

    Raises:
        InvalidConfig: it came from no checkpoint.
        InvalidSnapshot: its checkpoint is not one that fastbrain wrote.
    """
    if opened.kind != CHECKPOINT:
        raise InvalidConfig(
            f"--with-optimizer needs a run or a checkpoint, which have an optimizer's state; "
            f"this is {opened.source}"
        )
    path = opened.path
    recorded = manifest.document(path / "trainer_state.json")
    try:
        settings = Settings.from_tables(recorded["config"])
        step = int(recorded["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSnapshot(
            f"{path / 'trainer_state.json'} is not one that fastbrain wrote: {error!r}"
        ) from error
    model, train = opened.model, settings.train
    updates = torch.zeros((), dtype=torch.int64)
    huggingface.read_tensors(path / "optimizer.safetensors", moments(model) | {"updates": updates})
    model.optimizer = Optimizer.adam(
        # of the newest update, as a program that saves after it would have it
        settings.schedule().rate(max(step - 1, 0)),
        betas=train.betas,
        weight_decay=train.weight_decay,
        decay_vectors=False,
    )
    model.set_optimizer_step(int(updates))


def remove(path: Path) -> None:
    """Remove the state of an older export, if there is one, for good; Io if that fails."""
    with atomic.io_errors("remove", path):
        path.unlink(missing_ok=True)
        atomic.sync_dir(path.absolute().parent)
