"""Ids on their way into a token file, and what is worth knowing of them once they are there."""

import hashlib
from typing import BinaryIO

import numpy as np
import numpy.typing as npt


class IdWriter:
    """Writes arrays of ids to a binary file, one after another.

    Attributes:
        tokens: how many ids were written.
        max_id: the largest of them; -1 before there are any.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.tokens = 0
        self.max_id = -1
        self._file = file
        self._hash = hashlib.sha256()

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        if not len(ids):
            return
        data = ids.astype("<u4", copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max()))

    def sha256(self) -> str:
        """Of everything written, in hex."""
        return self._hash.hexdigest()
