"""The little TOML that a run directory needs written, and `key=value` on a command line read.

The standard library reads TOML but does not write it; what a configuration holds is text, numbers,
truth values, flat lists and small tables.
"""

import json
import tomllib
from collections.abc import Mapping

from fastbrain.errors import InvalidConfig


def dumps(tables: Mapping[str, object]) -> str:
    """A TOML document of `tables`: plain values first, then a section for every mapping.

    A None is left out, which is how TOML says it.
    """
    plain = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    lines = _assignments(plain)
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *_assignments(table)]
    return "\n".join(lines).lstrip("\n") + "\n"


def parse_override(argument: str) -> tuple[str, object]:
    """`table.key=value` of a command line as its dotted key and its value.

    The value is read as TOML; what is not TOML is text, so that paths need no quotes. `none` is
    None: the setting is taken back to its default.

    Raises:
        InvalidConfig: there is no `=`, or no key before it.
    """
    key, equals, value = argument.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise InvalidConfig(
            f"cannot read {argument!r}: an override is written as table.key=value, "
            "for example train.learning_rate=3e-4"
        )
    if value == "none":
        return key, None
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _assignments(table: Mapping[str, object]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_assignments(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    return repr(value)
