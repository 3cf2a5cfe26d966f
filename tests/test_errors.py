"""Every refusal is a FastBrainError, says what to do, and carries its numbers."""

import inspect
import pickle

import pytest

from fastbrain import errors
from fastbrain.errors import (
    CudaMemoryBudget,
    FastBrainError,
    InvalidConfig,
    Io,
    SequenceTooLong,
    TokenOutOfRange,
)

# fmt: off
KINDS = [
    "Cuda", "CudaMemoryBudget", "EmptyDataset", "FastBrainError", "InvalidConfig",
    "InvalidDataset", "InvalidSnapshot", "Io", "SequenceTooLong", "Serde", "TokenOutOfRange",
    "UnsupportedCuda",
]
# fmt: on
CARRYING = {
    TokenOutOfRange(32_000, 32_000): {"id": 32_000, "vocab": 32_000},
    SequenceTooLong(2049, 2048): {"length": 2049, "max": 2048},
    CudaMemoryBudget(9000, 8192): {"estimate_mib": 9000, "budget_mib": 8192},
}
carrying = pytest.mark.parametrize(
    ("error", "numbers"), CARRYING.items(), ids=[type(error).__name__ for error in CARRYING]
)


def test_the_kinds_are_those_of_the_reference_system():
    classes = inspect.getmembers(errors, inspect.isclass)
    assert sorted(name for name, _ in classes) == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_one_base_catches_every_kind(name):
    kind = getattr(errors, name)
    assert issubclass(kind, FastBrainError)
    assert kind.__doc__


def test_two_kinds_are_also_what_a_python_user_would_catch():
    with pytest.raises(ValueError, match="d_model"):
        raise InvalidConfig("d_model must be above 0, got 0")
    with pytest.raises(OSError, match="cut short"):
        raise Io("model.rbw is cut short")
    both = [k for k in KINDS if issubclass(getattr(errors, k), ValueError | OSError)]
    assert both == ["InvalidConfig", "Io"]


@carrying
def test_numbers_are_attributes_and_in_the_message(error, numbers):
    for name, value in numbers.items():
        assert getattr(error, name) == value
        assert str(value) in str(error)


@carrying
def test_errors_survive_the_way_from_another_process(error, numbers):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert all(getattr(copy, name) == value for name, value in numbers.items())


def test_messages_say_the_way_out():
    assert "ids 0 to 99" in str(TokenOutOfRange(100, 100))
    assert "tokenizer" in str(TokenOutOfRange(100, 100))
    assert "max_seq_len" in str(SequenceTooLong(3, 2))
    assert "raise budget_mib" in str(CudaMemoryBudget(2, 1))
