"""What `fastbrain plan` is asked for: shapes, cards and figures, out of words and files."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastbrain.config import TransformerConfig
from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.plan import CARDS, Card, Plan, Remedy, find_card, find_link, plan, remedies
from fastbrain.plan.choice import ASKED
from fastbrain.sweep_arch.values import tokens, whole
from fastbrain.training import config_files
from fastbrain.training.rules import MOST
from fastbrain.training.settings import LENGTHS, DataSettings, Settings

ALL = "all"
DEFAULT = "default model"
_BATCH, _SEQ = 8, 1024
_MIB = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """A model, and the step that its configuration asks for.

    Attributes:
        name: of the configuration.
        config: the model.
        settings: all of the configuration, its gaps filled.
        rows: of a step, where the configuration says it.
        run_tokens: of the run, where the configuration says it.
        vocabulary_assumed: whether the vocabulary is left to a tokenizer.
    """

    name: str
    config: TransformerConfig
    settings: Settings
    rows: int | None
    run_tokens: int | None
    vocabulary_assumed: bool


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was asked about.

    Attributes:
        label: what tells it apart from those beside it.
        shape: the configuration behind it.
        plan: what is predicted.
        tokens: of the run whose days are told.
        budget_bytes: to keep within, where one is given.
    """

    label: str
    shape: Shape
    plan: Plan
    tokens: int
    budget_bytes: int | None

    @property
    def limit_bytes(self) -> int:
        """What the step has to fit into; 0 where the machine's memory is unknown."""
        return _within(self.plan.card, self.budget_bytes) or 0

    @property
    def fits(self) -> bool:
        return not self.limit_bytes or self.plan.memory.needed_bytes <= self.limit_bytes

    @property
    def largest_micro_batch(self) -> int | None:
        """Rows, with accumulation; None where the machine's memory is unknown."""
        return self.plan.largest_micro_batch(self.limit_bytes) if self.limit_bytes else None

    def ways_out(self) -> tuple[Remedy, ...]:
        """The chapter's six."""
        made = self.plan
        return remedies(
            made.config,
            made.card,
            made.batch,
            made.seq,
            mixed_precision=made.mixed_precision,
            accumulate=made.accumulate,
            shards=made.shards,
        )


def planned(options: argparse.Namespace) -> list[Planned]:
    """Every plan that is asked for.

    Raises:
        FastBrainError: a word, a number, a configuration or a card is not what it may be.
    """
    number = whole(1)
    numbers = {
        name: _read(f"--{name}", getattr(options, name), number)
        for name in ("batch", "seq", "accumulate", "ranks")
    }
    _check_ranks(options, numbers["ranks"] or 1)
    run_tokens = _read("--tokens", options.tokens, tokens)
    budget_mib = _read("--budget-mib", options.budget_mib, whole(0))
    budget = budget_mib * _MIB if budget_mib else None
    names, overrides = _sorted(options.overrides)
    if options.compare and len(names) < 2:
        names += [each for each in config_files.shipped_shapes() if each not in names]
    if options.card == ALL:
        if len(names) > 1:
            raise InvalidConfig(
                f"--card {ALL} puts one shape on every card, got {len(names)} shapes: leave one, "
                "or name a card"
            )
        cards = list(CARDS.values())
    else:
        cards = [find_card(options.card)]
    found = []
    for name, label in _labels(names).items():
        try:
            shape = _shape(name, label, overrides, numbers["seq"])
            found += [_plan(shape, card, numbers, budget, options) for card in cards]
        except FastBrainError as error:
            if len(names) < 2:
                raise
            raise InvalidConfig(f"{label}: {error}") from error
    return [
        Planned(
            made.card.key if len(cards) > 1 else shape.name,
            shape,
            made,
            run_tokens or 0,
            budget,
        )
        for shape, made in found
    ]


def _sorted(words: list[str]) -> tuple[list[str], list[str]]:
    """Configurations and overrides, however they are mixed."""
    overrides = [word for word in words if "=" in word and not Path(word).is_file()]
    names = [word for word in words if word not in overrides]
    return list(dict.fromkeys(names)), overrides


def _labels(names: list[str]) -> dict[str, str]:
    """A short name for each configuration; the whole one where two would be the same."""
    short = [Path(name).stem if name.endswith(".toml") else name for name in names]
    return {
        name: each if short.count(each) == 1 else name
        for name, each in zip(names, short, strict=True)
    } or {"": DEFAULT}


def _shape(name: str, label: str, overrides: list[str], seq: int | None) -> Shape:
    # without a file, the positions are those of the builder and grow with no sequence
    builder = {"model": {"max_seq_len": TransformerConfig.max_seq_len}}
    read = config_files.read_tables(name) if name else builder
    tables = config_files.overridden(read, overrides)
    train = _table(tables, "train")
    if train.get("init") or _table(tables, "data").get("kind") == "instructions":
        raise InvalidConfig(
            f"{label} goes on from another model, whose shape is not said there: plan that one"
        )
    settings = Settings.from_tables(_filled(tables, DataSettings.seq_len if name else _SEQ, seq))
    return Shape(
        label,
        settings.config(TransformerConfig.vocab_size),
        settings,
        None if train.get("global_batch_size") is None else settings.train.global_batch_size,
        settings.steps * settings.step_tokens if _length(train) else None,
        bool(name) and "vocab_size" not in settings.model,
    )


def _filled(tables: Mapping[str, Any], usual: int, seq: int | None) -> dict[str, Any]:
    """The tables with what training would ask for and planning does not.

    Args:
        tables: as they were given.
        usual: tokens of a row where nobody says how many.
        seq: tokens of a row, where the command line says how many.
    """
    data, train, model = (_table(tables, name) for name in ("data", "train", "model"))
    most = model.get("max_seq_len")
    data = {key: value for key, value in data.items() if value is not None}
    if seq is not None or "seq_len" not in data:
        # the plan itself refuses what is longer than the model
        longest = most if type(most) is int else MOST
        data["seq_len"] = max(2, min(seq or usual, longest))
    result = dict(tables)
    if isinstance(tables.get("data", {}), Mapping):
        result["data"] = {"train": "-"} | data
    if isinstance(tables.get("train", {}), Mapping) and not _length(train):
        result["train"] = {**train, "max_steps": MOST}
    return result


def _length(train: Mapping[str, Any]) -> bool:
    return any(train.get(name) is not None for name in LENGTHS)


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table, or an empty one in place of what `Settings` is going to refuse."""
    found = tables.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _plan(
    shape: Shape,
    card: Card,
    numbers: Mapping[str, int | None],
    budget: int | None,
    options: argparse.Namespace,
) -> tuple[Shape, Plan]:
    train, ranks = shape.settings.train, numbers["ranks"] or 1
    # of a step on each rank, as many as reach those of all
    rows = None if shape.rows is None else -(-shape.rows // ranks)
    batch = numbers["batch"]
    if batch is None and isinstance(train.micro_batch_size, int):
        batch = train.micro_batch_size
    if batch is None:
        most = min(_BATCH, rows or _BATCH)
        batch = next(each for each in range(most, 0, -1) if not (rows or each) % each)
    mixed_precision = options.mixed_precision
    if mixed_precision is None and train.precision is not None:
        mixed_precision = train.precision == "bf16-mixed"
    made = plan(
        shape.config,
        card,
        batch,
        numbers["seq"] or shape.settings.data.seq_len,
        mixed_precision=mixed_precision,
        accumulate=numbers["accumulate"] or -(-(rows or 1) // batch),
        ranks=ranks,
        parallel=options.parallel or train.parallel,
        link=options.link,
        budget_bytes=_within(card, budget),
    )
    return shape, made


def _check_ranks(options: argparse.Namespace, ranks: int) -> None:
    """Refuses what is said of several ranks where there is one, and what they cannot be."""
    if options.parallel is not None and options.parallel not in ASKED:
        raise InvalidConfig(f"--parallel must be auto, ddp or fsdp, got {options.parallel!r}")
    if options.link is not None:
        find_link(options.link)
    for name in ("parallel", "link") if ranks == 1 else ():
        if getattr(options, name) is not None:
            raise InvalidConfig(
                f"--{name} says something of several ranks, and there is one: add --ranks 2, or "
                f"leave --{name} out"
            )


def _within(card: Card, budget: int | None) -> int | None:
    """The least of a budget and the card's memory, of those that are known."""
    known = [size for size in (card.memory_bytes, budget) if size]
    return min(known) if known else None


def _read(name: str, text: str | None, reader: Callable[[str], T]) -> T | None:
    try:
        return None if text is None else reader(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidConfig(f"{name} {error}") from None
