"""What may change when a run goes on, in three classes: never, on purpose, and freely.

The shape and the seed make a run what it is. Rate, rows and arithmetic decide its results, and may
be changed in the middle only where the user says so by name. The rest only watches.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from fastbrain.errors import InvalidConfig
from fastbrain.parallel.launch import Launch
from fastbrain.training.settings import Settings

# what only --override changes: everything else that decides a bit of the result
OVERRIDABLE = (
    "data.train",
    "data.validation",
    "data.seq_len",
    "train.max_steps",
    "train.max_tokens",
    "train.epochs",
    "train.global_batch_size",
    "train.learning_rate",
    "train.warmup_steps",
    "train.floor",
    "train.betas",
    "train.weight_decay",
    "train.max_norm",
    "train.precision",
)
# what may change, but ends the equality of bits with the run never stopped
WARNED = ("guard.policy",)
_NEVER = ("data.kind", "data.tokenizer", "data.template", "train.seed", "train.init")
_RATE = (
    "max_steps",
    "max_tokens",
    "epochs",
    "learning_rate",
    "warmup_steps",
    "floor",
    "global_batch_size",
)


def continued(
    then: Settings, wanted: Settings, step: int, overridden: Collection[str] = ()
) -> Settings:
    """The settings of a resumed run: those it had, and what may change as now wanted.

    Args:
        then: of the run so far, everything decided.
        wanted: now asked for; what it leaves open is as it was.
        step: steps finished where the run goes on, for what is said of the rate.
        overridden: dotted keys that the user changes on purpose.

    Raises:
        InvalidConfig: a difference that would make it another run, or that has to be asked for
            by --override; names both values.
    """
    wanted = _filled(wanted, then)
    forbidden = [*_model_changes(then, wanted), *_changes(then, wanted, _NEVER).values()]
    if forbidden:
        raise InvalidConfig(
            f"this is not the run that began there: {'; '.join(forbidden)}. "
            f"Leave it as it was, or begin another run with {Launch.find().run_option}"
        )
    asked_for = [key for key in OVERRIDABLE if key not in overridden]
    changed = _changes(then, wanted, asked_for)
    if changed:
        flags = " ".join(f"--override {key}={_argument(_value(wanted, key))}" for key in changed)
        raise InvalidConfig(
            f"this would change the run in the middle: {'; '.join(changed.values())}."
            f"{_rates(then, wanted, step, changed)} Leave it as it was, or say that you mean it: "
            f"{flags}"
        )
    require_length(wanted, step)
    return dataclasses.replace(wanted, model=then.model)


def require_length(settings: Settings, step: int) -> None:
    """Refuse a run that is shorter than what was trained of it.

    Raises:
        InvalidConfig: names both numbers of steps.
    """
    if settings.steps < step:
        raise InvalidConfig(
            f"the run would have {settings.steps} steps, and {step} are done: make it longer "
            "(--override train.max_steps=..., max_tokens or epochs), or go back by --step"
        )


def changes(then: Settings, now: Settings, step: int) -> list[str]:
    """What of the results' causes is changed, a sentence each, to be said when a run goes on."""
    found = _changes(then, now, (*OVERRIDABLE, *WARNED))
    if then.steps != now.steps:
        found["steps"] = f"the run had {then.steps} steps and now has {now.steps}"
    rates = _rates(then, now, step, found)
    return [*found.values(), *([rates.strip()] if rates else [])]


def _filled(wanted: Settings, then: Settings) -> Settings:
    train = wanted.train
    micro = train.micro_batch_size
    return wanted.with_train(
        init_sha256=then.train.init_sha256,
        epoch_rows=then.train.epoch_rows,
        precision=train.precision or then.train.precision,
        warmup_steps=then.train.warmup_steps if train.warmup_steps is None else train.warmup_steps,
        micro_batch_size=then.train.micro_batch_size if micro == "auto" else micro,
    )


def _model_changes(then: Settings, wanted: Settings) -> list[str]:
    vocab_size = then.model["vocab_size"]
    if then.train.init is not None:
        # what is not given is that of the model it began from, not a default
        wanted = dataclasses.replace(wanted, model={**then.model, **wanted.model})
    before, after = then.config(vocab_size), wanted.config(vocab_size)
    return [
        f"model.{each.name} was {getattr(before, each.name)} and is now {getattr(after, each.name)}"
        for each in dataclasses.fields(before)
        if getattr(before, each.name) != getattr(after, each.name)
    ]


def _changes(then: Settings, wanted: Settings, keys: Collection[str]) -> dict[str, str]:
    return {
        key: f"{key} was {_argument(_value(then, key))} and is now {_argument(_value(wanted, key))}"
        for key in keys
        if _value(then, key) != _value(wanted, key)
    }


def _value(settings: Settings, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(settings, table), name)


def _argument(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "none" if value is None else str(value)


def _rates(then: Settings, now: Settings, step: int, names: Collection[str]) -> str:
    if then.steps == now.steps and not {f"train.{key}" for key in _RATE} & set(names):
        return ""
    before, after = then.schedule(), now.schedule()
    return (
        f" The learning rate at step {step} was {before.rate(step):.4g} and is now "
        f"{after.rate(step):.4g}; at the end it was {before.rate(then.steps):.4g} and is now "
        f"{after.rate(now.steps):.4g}."
    )
