"""TensorBoard gets the numbers where it is, and costs no run where it is not or dies."""

import sys
import types
from importlib.util import find_spec

import pytest

from fastbrain.training import sinks
from fastbrain.training.sinks import TensorBoard

ROWS = [
    {"step": 1, "start": 1, "loss": 4.5, "grad_norm": None, "tokens": 128},
    {"step": 1, "start": 1, "val_loss": 4.25, "perplexity": 70.1, "bits_per_byte": None},
]


class Writer:
    """What the package would be, kept in memory; dies after `lives` numbers."""

    written: list[tuple[str, float, int]]
    lives = 99

    def __init__(self, folder: str) -> None:
        self.folder = folder
        Writer.written = []

    def add_scalar(self, key: str, value: float, step: int) -> None:
        if len(self.written) >= self.lives:
            raise OSError(28, "No space left on device")
        self.written.append((key, value, step))

    def close(self) -> None:
        if len(self.written) >= self.lives:
            raise OSError(28, "No space left on device")


@pytest.fixture
def installed(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(sinks, "find_spec", lambda name: object())


def test_every_curve_gets_its_numbers_and_nothing_else(installed, tmp_path):
    board = TensorBoard(tmp_path, pytest.fail)
    board.write(ROWS)
    board.close()
    assert Writer.written == [("loss", 4.5, 1), ("val_loss", 4.25, 1), ("perplexity", 70.1, 1)]


def test_one_that_dies_is_said_once(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(Writer, "lives", 1)
    said: list[str] = []
    board = TensorBoard(tmp_path, said.append)
    for _ in range(3):
        board.write(ROWS)
    board.close()
    assert len(said) == 1
    assert "TensorBoard gets no more numbers" in said[0]
    assert "No space left on device" in said[0]


def test_without_the_package_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    board = TensorBoard(tmp_path / "board", pytest.fail)
    board.write(ROWS)
    board.close()
    assert not (tmp_path / "board").exists()


def test_a_broken_installation_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    TensorBoard(tmp_path, said.append).write(ROWS)
    assert len(said) == 1


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_package_itself_writes_event_files(tmp_path):
    board = TensorBoard(tmp_path, pytest.fail)
    board.write(ROWS)
    board.close()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("events.out.tfevents")]
