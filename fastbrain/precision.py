"""The number formats of weights in files."""

from enum import StrEnum


class Precision(StrEnum):
    """How `save_bin` writes weights: exact, or as 8-bit integers with one scale per row."""

    F32 = "F32"
    Q8 = "Q8"
