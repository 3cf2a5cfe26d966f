"""The readers of single arguments: what each word may be, said in prose when it is not."""

import argparse
import math
import re
from collections.abc import Callable

from fastbrain.config import LinearScaling, Llama3Scaling, RopeScaling
from fastbrain.errors import InvalidConfig
from fastbrain.plan.choice import ASKED
from fastbrain.plan.links import Link, find_link

# the kernels count in signed 32-bit integers
_MOST = 2**31 - 1

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """A reader of whole numbers from `least` to `most`, for argparse."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got {text!r}"
            )
        return value

    return read


def tokens(text: str) -> int:
    """How many tokens `text` says: 50e9, 3.5B, 500M; argparse reports what is not a number."""
    match = re.fullmatch(r"([0-9._]+(?:[eE][+-]?[0-9]+)?)([kKmMbBtT]?)", text.strip())
    try:
        value = float(match[1]) * _UNITS[match[2].lower()] if match else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens from 1 up, like 50e9, 3.5B or 500M; got {text!r}"
        )
    return round(value)


def decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def layers(text: str) -> list[int]:
    read = whole(0)
    return [read(part) for part in text.split(",")]


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(
            f"must be cpu, cuda or cuda:N with the card's number; got {text!r}"
        )
    return text


def parallel(text: str) -> str:
    if text not in ASKED:
        raise argparse.ArgumentTypeError(f"must be auto, ddp or fsdp; got {text!r}")
    return text


def link(text: str) -> Link:
    try:
        return find_link(text)
    except InvalidConfig as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rope_scaling(text: str) -> RopeScaling:
    kind, *numbers = text.split(":")
    try:
        if kind == "linear" and len(numbers) == 1:
            return LinearScaling(float(numbers[0]))
        if kind == "llama3" and len(numbers) == 4:
            factor, low, high = map(float, numbers[:3])
            return Llama3Scaling(factor, low, high, int(numbers[3]))
    except InvalidConfig as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"must be linear:FACTOR or llama3:FACTOR:LOW:HIGH:ORIGINAL, like linear:4; got {text!r}"
    )
