"""One damage to a checkpoint, and what must come of it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MANIFEST = "MANIFEST.json"

# what becomes of the directory: renamed, left alone as another run's, used as nothing is wrong
# with it, or the command stops because a newer fastbrain wrote it
CORRUPT, FOREIGN, INTACT, NEWER = "corrupt", "foreign", "intact", "newer"


class Trial(NamedTuple):
    """One damage.

    Attributes:
        kind: what stands in the table.
        names: the file, or the other words, that the refusal must name.
        act: does it to the directory of a checkpoint.
        fate: what must become of it.
    """

    kind: str
    names: str
    act: Callable[[Path], object]
    fate: str = CORRUPT
