"""The keys under an architecture's name in a GGUF file: asked for one by one, none passed over."""

from collections.abc import Mapping
from typing import Any

from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.formats.strict_json import short


class Keys:
    """The keys under an architecture's name, and which of them have been asked for."""

    def __init__(self, arch: str, values: Mapping[str, Any]) -> None:
        self._prefix = f"{arch}."
        self._values = values
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """What the key is set to, or the default; without one it must be there."""
        self._asked.add(self._prefix + name)
        value = self._values.get(self._prefix + name, default)
        if value is None:
            raise InvalidSnapshot(f"the key {self._prefix}{name} is missing")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """One whole number, the same for all layers."""
        value = self.get(name, default)
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise InvalidConfig(
                f"{self._prefix}{name} is {short(value)}; fastbrain takes one whole number for "
                "all layers there"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise InvalidConfig(f"{self._prefix}{name} must be a number, not {short(value)}")
        return float(value)

    def same(self, name: str, expected: int, what: str) -> None:
        """Refuse another value of a key than this one, which it has where it is missing."""
        value = self.whole(name, expected)
        if value != expected:
            raise InvalidConfig(
                f"{self._prefix}{name} is {value}; fastbrain takes {what}, so {expected} here"
            )

    def refuse_others(self) -> None:
        """Refuse the file if it has a key that nobody has asked for."""
        # without a meaning here, but in older files
        self._asked |= {
            self._prefix + name
            for name in ("tensor_data_layout", "rope.scaling.original_context_length")
        }
        for key in self._values:
            if key.startswith(self._prefix) and key not in self._asked:
                raise InvalidConfig(
                    f"the file sets {short(key)} to {short(self._values[key])}, a setting that "
                    "fastbrain does not have"
                )
