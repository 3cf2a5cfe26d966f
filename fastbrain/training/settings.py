"""The settings of a training run: which keys there are, what each may be, and what they imply.

Everything wrong with a value is found here, without torch and before anything is allocated, so
that a slip is answered in the time it takes to read the file.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fastbrain.config import (
    LinearScaling,
    Llama3Scaling,
    LoraConfig,
    RopeScaling,
    TransformerConfig,
)
from fastbrain.errors import InvalidConfig
from fastbrain.schedule import Schedule
from fastbrain.training import rules

# a run is as long as one of these says
LENGTHS = ("max_steps", "max_tokens", "epochs")

# a run directory's own configuration carries these beside the tables
STAMPS = ("format_version", "run_id", "overridden")

_SCALINGS: dict[str, type[LinearScaling] | type[Llama3Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}


def _setting(check: rules.Check, default: object = None) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class DataSettings:
    """Where the text comes from; paths are taken from the current directory."""

    train: str = _setting(rules.text, "")
    validation: str | None = _setting(rules.text)
    tokenizer: str | None = _setting(rules.text)
    seq_len: int = _setting(rules.whole(2), 512)
    kind: str = _setting(rules.choice("text", "instructions"), "text")
    template: str | None = _setting(rules.text)
    skip_bad: bool = _setting(rules.flag, False)


@dataclass(frozen=True)
class TrainSettings:
    """From which weights, how long, how large and how fast; None is what the program decides."""

    init: str | None = _setting(rules.text)
    # of the weights there, once they were read
    init_sha256: str | None = _setting(rules.text)
    max_steps: int | None = _setting(rules.whole(1))
    max_tokens: int | None = _setting(rules.whole(1, 2**63 - 1))
    epochs: int | None = _setting(rules.whole(1))
    # rows of an epoch, once they are known
    epoch_rows: int | None = _setting(rules.whole(1))
    global_batch_size: int = _setting(rules.whole(1), 32)
    micro_batch_size: int | str = _setting(rules.either("auto", rules.whole(1)), "auto")
    learning_rate: float = _setting(rules.number(0, 10, open_low=True), 3e-4)
    warmup_steps: int | None = _setting(rules.whole(0))
    floor: float = _setting(rules.number(0, 1), 0.1)
    betas: tuple[float, float] = _setting(rules.betas, (0.9, 0.95))
    weight_decay: float = _setting(rules.number(0, 10), 0.1)
    max_norm: float = _setting(rules.number(0, open_low=True), 1.0)
    precision: str | None = _setting(rules.choice("f32", "bf16-mixed"))
    seed: int = _setting(rules.whole(0, 2**64 - 1), 42)
    parallel: str = _setting(rules.choice("auto", "ddp", "fsdp"), "auto")
    max_time: str | None = _setting(rules.duration)


@dataclass(frozen=True)
class SaveSettings:
    """When a checkpoint is written and which ones stay."""

    interval_min: float | None = _setting(rules.number(0, open_low=True))
    interval_steps: int | None = _setting(rules.whole(1))
    keep: int = _setting(rules.whole(1), 3)
    keep_every: int = _setting(rules.whole(0), 0)


@dataclass(frozen=True)
class EvalSettings:
    """How often the held-out text is scored (in steps), and how many samples are written then."""

    interval: int = _setting(rules.whole(1), 500)
    samples: int = _setting(rules.whole(0, 100), 2)


@dataclass(frozen=True)
class GuardSettings:
    """What happens after steps whose loss or gradient is not finite, or far too large."""

    policy: str = _setting(rules.choice("skip", "rollback", "stop"), "skip")


@dataclass(frozen=True)
class Settings:
    """A whole configuration, every value checked; `model` holds the keys given, no more."""

    model: Mapping[str, Any]
    data: DataSettings
    train: TrainSettings
    save: SaveSettings
    eval: EvalSettings
    guard: GuardSettings

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> Self:
        """Check parsed TOML.

        Raises:
            InvalidConfig: an unknown key (named with the nearest one), or a value that breaks a
                rule (named with the value and the rule).
        """
        tables = {key: value for key, value in tables.items() if key not in STAMPS}
        _refuse_unknown(tables)
        parts = {name: _part(kind, name, tables.get(name, {})) for name, kind in _PARTS.items()}
        model = {key: each for key, each in tables.get("model", {}).items() if each is not None}
        settings = cls(model=model, **parts)
        settings.check()
        return settings

    def config(self, vocab_size: int) -> TransformerConfig:
        """The model's shape, with the tokenizer's vocabulary where the file names none."""
        longest = max(TransformerConfig.max_seq_len, self.data.seq_len)
        return shape({"vocab_size": vocab_size, "max_seq_len": longest, **self.model})

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.train.global_batch_size * self.data.seq_len

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run; `max_tokens` is reached, not stopped short of.

        0 for epochs of which the rows are not known yet.
        """
        train = self.train
        if train.max_steps is not None:
            return train.max_steps
        if train.epochs is not None:
            return -(-train.epochs * (train.epoch_rows or 0) // train.global_batch_size)
        return -(-(train.max_tokens or 0) // self.step_tokens)

    @property
    def warmup(self) -> int:
        """Steps of warm-up: those asked for, or 2 % of the run, rounded up."""
        asked = self.train.warmup_steps
        return -(-self.steps // 50) if asked is None else asked

    @property
    def save_every_s(self) -> float | None:
        """Seconds between checkpoints: 15 minutes where no interval is given at all."""
        if self.save.interval_min is not None:
            return self.save.interval_min * 60
        return None if self.save.interval_steps is not None else 15 * 60.0

    def schedule(self) -> Schedule:
        """The learning rate of every step."""
        train = self.train
        return Schedule.warmup_cosine(train.learning_rate, self.warmup, self.steps).floor(
            train.floor
        )

    def tables(self) -> dict[str, dict[str, Any]]:
        """The settings as the tables of a TOML or JSON document."""
        return {"model": dict(self.model)} | {
            name: dataclasses.asdict(getattr(self, name)) for name in _PARTS
        }

    def paths(self) -> dict[str, str]:
        """The files and folders that are named, by dotted key."""
        keys = ("train", "validation", "tokenizer", "template")
        data = {f"data.{key}": getattr(self.data, key) for key in keys}
        return {k: path for k, path in {**data, "train.init": self.train.init}.items() if path}

    def absolute(self) -> Self:
        """The same settings with paths that hold from any directory."""
        paths: dict[str, Any] = {
            key.partition(".")[2]: str(Path(path).absolute()) for key, path in self.paths().items()
        }
        init = paths.pop("init", None)
        data = dataclasses.replace(self.data, **paths)
        return dataclasses.replace(self.with_train(init=init), data=data)

    def with_model(self, config: TransformerConfig) -> Self:
        """The same settings with every field of the model spelled out."""
        model = dataclasses.asdict(config)
        for name, kind in _SCALINGS.items():
            if isinstance(config.rope_scaling, kind):
                model["rope_scaling"] = {"rope_type": name, **model["rope_scaling"]}
        return dataclasses.replace(self, model=model)

    def with_train(self, **values: Any) -> Self:
        """The same settings with some of [train] decided."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, **values))

    def check(self) -> None:
        """Refuse settings that do not go together; what is not decided yet is not looked at.

        Raises:
            InvalidConfig: names the settings, their values and the rule.
        """
        data, train = self.data, self.train
        if not data.train:
            raise InvalidConfig(
                "data.train is missing: say which text to train on, for example "
                "data.train=corpus.txt (text, .jsonl, .parquet, a folder of them, or a token file "
                ".bin)"
            )
        given = [f"train.{name}" for name in LENGTHS if getattr(train, name) is not None]
        if len(given) != 1:
            raise InvalidConfig(
                "the length of the run is one of train.max_steps, train.max_tokens and "
                f"train.epochs; the configuration has {' and '.join(given) or 'none of them'}"
            )
        if train.epochs is not None and data.kind == "text":
            raise InvalidConfig(
                "train.epochs is for data.kind instructions: text is read at random places and has "
                "no epochs; give train.max_steps or train.max_tokens"
            )
        if self.steps and self.warmup > self.steps:
            raise InvalidConfig(
                f"train.warmup_steps must be at most the steps of the run, which are "
                f"{self.steps}, got {self.warmup}; give a lower train.warmup_steps as well"
            )
        if data.kind == "text" and (data.template is not None or data.skip_bad):
            raise InvalidConfig(
                "data.template and data.skip_bad are for data.kind instructions; leave them out"
            )
        if data.kind == "instructions" and data.tokenizer is None and train.init is None:
            raise InvalidConfig(
                "instructions need a tokenizer that was trained before: give train.init, a model "
                "to go on from, or data.tokenizer"
            )
        micro, rows = train.micro_batch_size, train.global_batch_size
        if isinstance(micro, int) and rows % micro:
            lower = rows // micro * micro
            near = f"{lower} and {lower + micro}" if lower else f"{micro}"
            raise InvalidConfig(
                f"train.global_batch_size must be a multiple of train.micro_batch_size, which is "
                f"{micro}; got {rows}, nearest: {near}"
            )
        lora = _objects(self.model)["lora"]
        if train.init is None and lora is not None:
            raise InvalidConfig(
                "model.lora trains adapters beside weights that are frozen: give train.init, the "
                "model that has them, or leave model.lora out"
            )
        # with train.init the rest of the shape is that model's, and is checked once it is known
        alone = train.init is None or "d_model" in self.model
        longest = self.config(TransformerConfig.vocab_size).max_seq_len if alone else data.seq_len
        if longest < data.seq_len:
            raise InvalidConfig(
                f"model.max_seq_len must be at least data.seq_len, which is {data.seq_len}, "
                f"got {longest}"
            )


def shape(model: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that the keys of [model] describe.

    Raises:
        InvalidConfig: a value breaks a rule.
    """
    objects = _objects(model)
    try:
        return TransformerConfig(**{**model, **objects})
    except InvalidConfig as error:
        raise InvalidConfig(f"[model] {error}") from error


def _objects(model: Mapping[str, Any]) -> dict[str, Any]:
    """What is a table in [model], as the configuration holds it; None where it is not given."""
    try:
        scaling, lora = model.get("rope_scaling"), model.get("lora")
        return {"rope_scaling": _rope_scaling(scaling), "lora": _lora(lora)}
    except InvalidConfig as error:
        raise InvalidConfig(f"[model] {error}") from error


_PARTS: dict[str, type] = {
    "data": DataSettings,
    "train": TrainSettings,
    "save": SaveSettings,
    "eval": EvalSettings,
    "guard": GuardSettings,
}
_KEYS = {name: [each.name for each in dataclasses.fields(kind)] for name, kind in _PARTS.items()}
_KEYS["model"] = [each.name for each in dataclasses.fields(TransformerConfig)]


def _part(kind: type, name: str, table: Mapping[str, object]) -> Any:
    checks = {each.name: each.metadata["check"] for each in dataclasses.fields(kind)}
    given = {key: value for key, value in table.items() if value is not None}
    return kind(**{key: checks[key](f"{name}.{key}", value) for key, value in given.items()})


def _refuse_unknown(tables: Mapping[str, object]) -> None:
    for name, table in tables.items():
        if name not in _KEYS:
            raise InvalidConfig(f"unknown setting {name!r}{_nearest(name, name)}")
        if not isinstance(table, Mapping):
            raise InvalidConfig(f"[{name}] must be a table of settings, got {rules.shown(table)}")
        for key in table:
            if key not in _KEYS[name]:
                raise InvalidConfig(f"unknown setting {name}.{key}{_nearest(key, f'{name}.{key}')}")


def _nearest(key: str, dotted: str) -> str:
    known = {f"{table}.{each}": each for table, keys in _KEYS.items() for each in keys}
    # the right key in the wrong table, or its initials, as in train.lr
    meant = [name for name, each in known.items() if key in (each, _initials(each))]
    close = difflib.get_close_matches(dotted, [*known, *_KEYS], n=1, cutoff=0.0)
    return f"; did you mean {(meant or close)[0]}?"


def _initials(key: str) -> str:
    return "".join(word[0] for word in key.split("_"))


def _lora(value: object) -> LoraConfig | None:
    if value is None or isinstance(value, LoraConfig):
        return value
    names = [each.name for each in dataclasses.fields(LoraConfig)]
    if not isinstance(value, Mapping) or "rank" not in value or not set(value) <= set(names):
        raise InvalidConfig(
            f"lora must be a table with rank, and perhaps alpha and seed, got {rules.shown(value)}"
        )
    return LoraConfig(**value)


def _rope_scaling(value: object) -> RopeScaling | None:
    if isinstance(value, RopeScaling | None):
        return value
    kinds = " or ".join(f'"{each}"' for each in _SCALINGS)
    if not isinstance(value, Mapping) or value.get("rope_type") not in _SCALINGS:
        raise InvalidConfig(
            f"rope_scaling must be a table with rope_type {kinds}, got {rules.shown(value)}"
        )
    kind = _SCALINGS[value["rope_type"]]
    numbers = {key: each for key, each in value.items() if key != "rope_type"}
    names = [each.name for each in dataclasses.fields(kind)]
    if sorted(numbers) != sorted(names):
        raise InvalidConfig(
            f"rope_scaling of this type has the keys {', '.join(names)}; got {', '.join(numbers)}"
        )
    for key, each in numbers.items():
        rules.number(0, open_low=True)(f"rope_scaling.{key}", each)
    return kind(**numbers)
