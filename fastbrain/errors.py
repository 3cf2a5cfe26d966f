"""What can go wrong, one class per kind, under one base.

The kinds are those of the reference system, so that a port of its error handling keeps its shape.
Two of them are also the built-in exception that a Python user would catch: `InvalidConfig` is a
`ValueError`, `Io` is an `OSError`.
"""

from typing import Self


class FastBrainError(Exception):
    """Anything that fastbrain refuses or fails at."""


class EmptyDataset(FastBrainError):
    """There is nothing to train on or to predict from."""


class InvalidDataset(FastBrainError):
    """A token file or a text file is not what it should be; the message names the place."""


class InvalidSnapshot(FastBrainError):
    """A checkpoint file is not one, or belongs to another architecture."""


class Io(FastBrainError, OSError):
    """A file is missing, cut short, or cannot be read or written."""


class Serde(FastBrainError):
    """A header or record is not valid JSON, or lacks a key."""


class InvalidConfig(FastBrainError, ValueError):
    """A setting breaks a rule; the message names the setting, its value and the rule."""


class TokenOutOfRange(FastBrainError):
    """A token id is not in the vocabulary.

    Attributes:
        id: the offending token id.
        vocab: the vocabulary size; ids are in [0, vocab).
    """

    def __init__(self, id: int, vocab: int) -> None:
        super().__init__(
            f"token id {id} is outside the vocabulary of {vocab} (ids 0 to {vocab - 1}); "
            "was the text encoded with this model's tokenizer?"
        )
        self.id = id
        self.vocab = vocab

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (self.id, self.vocab)


class SequenceTooLong(FastBrainError):
    """A sequence reaches past the positions that the model has.

    Attributes:
        length: the length reached, in tokens.
        max: `max_seq_len` of the model.
    """

    def __init__(self, length: int, max: int) -> None:
        super().__init__(
            f"a sequence of {length} tokens is longer than the model's max_seq_len of {max}; "
            "shorten it, or build the model with a larger max_seq_len"
        )
        self.length = length
        self.max = max

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (self.length, self.max)


class CudaMemoryBudget(FastBrainError):
    """The model does not fit the memory budget that `to_cuda` was given.

    Attributes:
        estimate_mib: MiB that weights, gradients and moments need.
        budget_mib: MiB that the caller allowed.
    """

    def __init__(self, estimate_mib: int, budget_mib: int) -> None:
        super().__init__(
            f"weights, gradients and moments need {estimate_mib} MiB, more than the budget of "
            f"{budget_mib} MiB; raise budget_mib (0 is unlimited) or build a smaller model"
        )
        self.estimate_mib = estimate_mib
        self.budget_mib = budget_mib

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (self.estimate_mib, self.budget_mib)


class Cuda(FastBrainError):
    """The device failed or ran out of memory."""


class UnsupportedCuda(FastBrainError):
    """There is no CUDA device, or it is too old for the kernels."""
