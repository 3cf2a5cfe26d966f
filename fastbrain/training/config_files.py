"""Where a configuration is read from: a TOML file, a shipped one by its name, and overrides."""

from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fastbrain.errors import InvalidConfig, Io, Serde
from fastbrain.formats import strict_toml
from fastbrain.training import rules, toml
from fastbrain.training.settings import LENGTHS, Settings


def load(config: str, overrides: Iterable[str] = ()) -> Settings:
    """Read a configuration: a TOML file or the bare name of a shipped one, then overrides.

    Raises:
        InvalidConfig: as `Settings.from_tables`; also no such configuration, broken TOML, or an
            override that cannot be read.
        Io: the file cannot be read.
    """
    return Settings.from_tables(overridden(read_tables(config), overrides))


def read_tables(config: str) -> dict[str, Any]:
    """The parsed TOML of a file or of a shipped configuration, its keys unchecked."""
    path = Path(config)
    if not path.is_file() and config not in shipped_names():
        raise InvalidConfig(
            f"there is no configuration {config!r}: give a TOML file, or one of the "
            f"shipped ones: {', '.join(shipped_names())}"
        )
    shipped = resources.files("fastbrain") / "configs" / f"{config}.toml"
    try:
        with (path if path.is_file() else shipped).open("rb") as file:
            return strict_toml.loads(file.read(strict_toml.MAX_BYTES + 1))
    except OSError as error:
        raise Io(f"cannot read {config}: {error.strerror}") from error
    except Serde as error:
        raise InvalidConfig(f"{config} is not valid TOML: {error}") from error


def shipped_names() -> list[str]:
    """The configurations that come with the package."""
    names = [each.name for each in (resources.files("fastbrain") / "configs").iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def shipped_shapes() -> list[str]:
    """Those of them that are of a model to build; the others go on from one."""
    return [name for name in shipped_names() if "model" in read_tables(name)]


def overridden(tables: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The tables with `table.key=value` arguments put over them; the input is left alone.

    A length given here (`train.max_steps`, `max_tokens` or `epochs`) replaces that of the file,
    because a run has one of them.
    """
    result = {key: dict(each) if isinstance(each, dict) else each for key, each in tables.items()}
    given = dict(toml.parse_override(argument) for argument in overrides)
    for dotted, value in given.items():
        name, dot, key = dotted.partition(".")
        if not dot:
            raise InvalidConfig(
                f"cannot set {dotted!r}: an override names its table, like train.learning_rate=3e-4"
            )
        table = result.setdefault(name, {})
        if not isinstance(table, dict):
            raise InvalidConfig(f"[{name}] must be a table of settings, got {rules.shown(table)}")
        table[key] = value
        if name == "train" and key in LENGTHS:
            for other in LENGTHS:
                if f"train.{other}" not in given:
                    table.pop(other, None)
    return result


def check_sources(settings: Settings, keys: Collection[str] | None = None) -> None:
    """Refuse paths that are not there, before anything slow begins: all, or those of `keys`."""
    for dotted, path in settings.paths().items():
        if (keys is None or dotted in keys) and not Path(path).exists():
            raise Io(f"{dotted}: there is no file or folder {path}")
