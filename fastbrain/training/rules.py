"""What one value of a configuration file may be: a check per kind, each with its error in prose.

A check takes the setting's dotted name and the value that TOML gave, and returns the value that
the program uses. It sees values of any type: a wrong type is as much the user's slip as a wrong
number, and both are answered before anything is allocated.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from fastbrain.errors import InvalidConfig

Check = Callable[[str, object], Any]

# what still fits a 32-bit index; a larger count is a slip of the keyboard
MOST = 2**31 - 1

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")


def shown(value: object) -> str:
    """A value as the user typed it, as nearly as TOML lets us know."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def whole(low: int, high: int = MOST) -> Check:
    """A whole number from `low` to `high`; 1e9 is one, 8.5 and true are not."""

    def check(name: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidConfig(f"{name} must be a whole number, got {shown(value)}")
        if not low <= value <= high:
            raise InvalidConfig(f"{name} must be from {low} to {high}, got {value}")
        return value

    return check


def number(low: float, high: float = math.inf, open_low: bool = False) -> Check:
    """A finite number from `low` to `high`; with `open_low`, above `low`."""
    bounds = f"above {low}" if open_low else f"at least {low}"
    if high < math.inf:
        bounds += f" and at most {high}"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidConfig(f"{name} must be a number, got {shown(value)}")
        if not math.isfinite(value):
            raise InvalidConfig(f"{name} must be a finite number, got {value}")
        if not low <= value <= high or (open_low and value == low):
            raise InvalidConfig(f"{name} must be {bounds}, got {value}")
        return float(value)

    return check


def text(name: str, value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidConfig(f"{name} must be text in quotes, got {shown(value)}")
    return value


def flag(name: str, value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise InvalidConfig(f"{name} must be true or false, got {shown(value)}")
    return value


def choice(*allowed: str) -> Check:
    """One of a few words."""

    def check(name: str, value: object) -> str:
        if value not in allowed:
            words = " or ".join(f'"{word}"' for word in allowed)
            raise InvalidConfig(f"{name} must be {words}, got {shown(value)}")
        return str(value)

    return check


def either(word: str, other: Check) -> Check:
    """One word, or what another check lets through."""

    def check(name: str, value: object) -> Any:
        if isinstance(value, str):
            if value != word:
                raise InvalidConfig(f'{name} must be "{word}" or a number, got {shown(value)}')
            return value
        return other(name, value)

    return check


def betas(name: str, value: object) -> tuple[float, float]:
    """Adam's two decay rates, each at least 0 and below 1."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InvalidConfig(f"{name} must be two numbers like [0.9, 0.95], got {shown(value)}")
    first, second = (number(0)(name, each) for each in value)
    if max(first, second) >= 1:
        raise InvalidConfig(f"{name} must both be below 1, got {shown(value)}")
    return first, second


def duration(name: str, value: object) -> str:
    """A length of time with its units, such as "90m" or "1d12h"."""
    if not isinstance(value, str) or not _DURATION.fullmatch(value) or seconds(value) <= 0:
        raise InvalidConfig(
            f'{name} must be a time with its unit, like "90m", "8h" or "1d12h", got {shown(value)}'
        )
    return value


def seconds(length: str) -> float:
    """The seconds of a time that `duration` let through."""
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[dhms]", length))
