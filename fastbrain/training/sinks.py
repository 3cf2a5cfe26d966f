"""TensorBoard, where it is installed: the numbers of metrics.jsonl once more, for its curves."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# those that make a curve
_CURVES = (
    "loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_s",
    "val_loss", "perplexity", "bits_per_byte",
)  # fmt: skip


class TensorBoard:
    """Event files in a folder; nothing where the package is missing. One that dies warns once.

    Args:
        folder: of the event files, which TensorBoard merges.
        warn: called with one sentence.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._writer: Any = None
        if find_spec("tensorboard") is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it imports warns of its own plans
                from torch.utils.tensorboard import SummaryWriter
            self._writer = SummaryWriter(str(folder))
        except Exception as error:  # a broken installation is no reason not to train
            self._give_up(error)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add metrics rows."""
        if self._writer is None:
            return
        try:
            for row in rows:
                for key in _CURVES:
                    if row.get(key) is not None:
                        self._writer.add_scalar(key, row[key], row["step"])
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        self._warn(f"warning: TensorBoard gets no more numbers ({error}); training goes on")
