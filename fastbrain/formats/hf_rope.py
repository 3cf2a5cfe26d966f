"""Rotary settings as a config.json spells them.

They are `rope_theta` and `rope_scaling` in files of transformers 4, and `rope_parameters` in those
of version 5.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastbrain.config import LinearScaling, Llama3Scaling, RopeScaling
from fastbrain.errors import InvalidConfig, Serde
from fastbrain.formats.strict_json import short

_MOST = 1e38
_LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


class Rope(NamedTuple):
    """The base of the frequencies, how they are scaled, and the key that says so."""

    theta: float
    scaling: RopeScaling | None
    key: str


def rope(settings: Mapping[str, Any], absent_theta: float | None) -> Rope:
    """The rotary settings of a config.json.

    Args:
        absent_theta: what the class takes an absent rope_theta to mean; None where it must be
            there.

    Raises:
        InvalidConfig: a rule that fastbrain lacks, or two places that contradict each other.
        Serde: a key is missing or of the wrong type.
    """
    given = {
        key: settings[key]
        for key in ("rope_parameters", "rope_scaling")
        if settings.get(key) is not None
    }
    for key, value in given.items():
        if not isinstance(value, dict):
            raise Serde(f"{key} must be an object, not {short(value)}")
    thetas = [
        (where, _theta(value["rope_theta"], where))
        for where, value in {"config.json": settings, **given}.items()
        if value.get("rope_theta") is not None
    ]
    if not thetas and absent_theta is None:
        raise Serde("the key rope_theta is missing")
    for where, theta in thetas:
        if theta != thetas[0][1]:
            raise InvalidConfig(
                f"rope_theta is {thetas[0][1]} in {thetas[0][0]} and {theta} in {where}; make them "
                "agree"
            )
    scalings = [(key, _scaling(value, key)) for key, value in given.items()]
    for key, scaling in scalings:
        if scaling != scalings[0][1]:
            raise InvalidConfig(
                f"{scalings[0][0]} is {short(given[scalings[0][0]])} and {key} is "
                f"{short(given[key])}; make them agree"
            )
    key, found = scalings[0] if scalings else ("rope_parameters", None)
    base = thetas[0][1] if thetas else absent_theta
    assert base is not None
    return Rope(base, found, key)


def _theta(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) < _MOST:
        raise Serde(f"rope_theta in {where} must be a finite number, not {short(value)}")
    return float(value)


def _scaling(value: dict[str, Any], key: str) -> RopeScaling | None:
    if value.get("partial_rotary_factor") not in (None, 1):
        raise InvalidConfig(
            f"{key}.partial_rotary_factor is {short(value['partial_rotary_factor'])}; fastbrain "
            "turns all of a head's channels"
        )
    # version 4 called it type at first, and then wrote both
    kinds = [value[name] for name in ("rope_type", "type") if value.get(name) is not None]
    if not kinds and any(isinstance(each, dict) for each in value.values()):
        raise InvalidConfig(
            f"{key} is {short(value)}; in fastbrain all layers turn by the same frequencies"
        )
    kind = kinds[0] if kinds else "default"
    if any(each != kind for each in kinds):
        raise InvalidConfig(f"{key} has rope_type {short(kinds[0])} and type {short(kinds[1])}")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(**_values(value, key, ("factor",)))
    if kind == "llama3":
        return Llama3Scaling(**_values(value, key, _LLAMA3))
    raise InvalidConfig(
        f"rope_type in {key} is {short(kind)}; fastbrain knows default, linear and llama3"
    )


def _values(value: dict[str, Any], key: str, names: tuple[str, ...]) -> dict[str, Any]:
    for name in names:
        if name not in value:
            raise Serde(f"{key} lacks the key {name}")
    return {name: value[name] for name in names}
