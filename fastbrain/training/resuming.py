"""What may change when a run goes on: everything that only watches, nothing that decides a bit."""

import dataclasses
from pathlib import Path
from typing import Any

from fastbrain.errors import InvalidConfig
from fastbrain.training.settings import Settings

_DECISIVE = (
    "global_batch_size",
    "learning_rate",
    "floor",
    "betas",
    "weight_decay",
    "max_norm",
    "precision",
    "seed",
)


def absolute(settings: Settings) -> Settings:
    """The same settings with paths that hold from any directory."""
    data = settings.data
    paths: dict[str, Any] = {
        key: str(Path(path).absolute())
        for key in ("train", "validation", "tokenizer")
        if (path := getattr(data, key)) is not None
    }
    return dataclasses.replace(settings, data=dataclasses.replace(data, **paths))


def continued(stored: Settings, wanted: Settings) -> Settings:
    """The settings of a resumed run: those it began with, and what may change as now wanted.

    Args:
        stored: of the run's own config.toml, everything decided.
        wanted: now asked for; what it leaves open is as it was.

    Raises:
        InvalidConfig: a difference that would make it another run; names both values.
    """
    vocab_size = stored.model["vocab_size"]
    train = wanted.train
    wanted = wanted.with_train(
        precision=train.precision or stored.train.precision,
        micro_batch_size=(
            stored.train.micro_batch_size
            if train.micro_batch_size == "auto"
            else train.micro_batch_size
        ),
    )
    then, now = _decisive(stored, vocab_size), _decisive(wanted, vocab_size)
    changed = [
        f"{key} was {then[key]} and is now {now[key]}" for key in then if then[key] != now[key]
    ]
    if changed:
        raise InvalidConfig(
            f"this is not the run that began there: {'; '.join(changed)}. "
            "Leave it as it was, or begin another run with --run"
        )
    return dataclasses.replace(wanted, model=stored.model)


def _decisive(settings: Settings, vocab_size: int) -> dict[str, Any]:
    config = settings.config(vocab_size)
    return (
        {f"model.{each.name}": getattr(config, each.name) for each in dataclasses.fields(config)}
        | {f"data.{key}": value for key, value in dataclasses.asdict(settings.data).items()}
        | {f"train.{key}": getattr(settings.train, key) for key in _DECISIVE}
        | {"the number of steps": settings.steps, "train.warmup_steps": settings.warmup}
    )
