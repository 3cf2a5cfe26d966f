"""The line on the terminal: what it says, and that nothing depends on it."""

import io
import sys
from functools import partial

import pytest
from texts import codes, dumped, tokenize_lines

from fastbrain.tokens.progress import Progress, _duration


@pytest.fixture
def write(tmp_path):
    return partial(tokenize_lines, tmp_path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals_only(write, monkeypatch):
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("fastbrain.tokens.progress._PERIOD", -1.0)
        write(dumped(*["ab"] * 100))
        assert ("tokens" in stream.getvalue()) == shown
        assert stream.getvalue().endswith("\r") == shown


def test_progress_tells_share_rate_and_time_left(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    clock = iter([0.0, 10.0, 10.1])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress("corpus.bin", 400_000_000) as shown:
        shown.update(100_000_000, 25_000_000)
        shown.update(100_000_001, 25_000_001)  # too soon to be drawn
    line = "corpus.bin  25%  25.0M tokens  10.0 MB/s  30s left"
    assert stream.getvalue() == f"\r{line}\r{' ' * len(line)}\r"


def test_durations_read_well():
    assert [_duration(s) for s in (5, 65, 3700)] == ["5s", "1m 05s", "1h 01m"]


def test_a_terminal_that_goes_away_is_no_error(write, monkeypatch):
    class Gone(Terminal):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr("fastbrain.tokens.progress._PERIOD", -1.0)
    assert write(dumped("ab")) == codes("ab")
