"""What the progress line of a run says is true, also after a resume, and its terminal may die."""

import io

import pytest

from fastbrain.training.progress import Console, Pace, Standing, short_count, short_rate, short_time


class Clock:
    """A clock that goes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("first", [0, 9_000])
def test_the_time_left_is_right_after_twenty_steps_wherever_they_begin(first):
    clock = Clock()
    pace = Pace(first, clock)
    clock.now += 30  # set-up, and a first step that compiles
    for step in range(first + 1, first + 22):
        clock.now += 1.5 if step % 2 else 2.5
        pace.tick(step)
    assert pace.remaining_s(first + 21, 10_000) == pytest.approx((9_979 - first) * 2, rel=0.05)


def test_the_speed_is_that_since_the_last_line_without_pauses():
    clock = Clock()
    pace = Pace(100, clock)
    for step in range(101, 111):
        clock.now += 0.5
        pace.tick(step)
    assert pace.lap(110) == pytest.approx(2.0)
    with pace.pause():
        clock.now += 30
        with pace.pause():  # a checkpoint of a best evaluation
            clock.now += 20
    with pace.pause():
        clock.now += 10
    clock.now += 1
    assert pace.lap(114) == pytest.approx(4.0)
    assert pace.since_lap_s() == 0
    assert pace.elapsed_s() == 66


def standing(**changes) -> Standing:
    values = {
        "step": 1200, "total": 50_000, "loss": 3.4123, "val_loss": 3.51, "grad_norm": 0.617,
        "learning_rate": 3e-4, "tokens_per_s": 41_234.0, "used_bytes": 9_800_000_000,
        "device_bytes": 12_000_000_000, "skipped": 0, "remaining_s": 2 * 86_400 + 3 * 3_600,
    }  # fmt: skip
    return Standing(**(values | changes))


def test_the_line_has_everything():
    assert (
        standing()
        .line(now=0)
        .startswith(
            "step 1200/50000  loss 3.412  val 3.510  gnorm 0.62  lr 3.0e-4  41.2k tok/s  "
            "mem 9.8/12.0 GB  skipped 0  ETA 2d 3h ("
        )
    )
    assert (
        standing(val_loss=None, device_bytes=None)
        .line(now=0)
        .startswith(
            "step 1200/50000  loss 3.412  gnorm 0.62  lr 3.0e-4  41.2k tok/s  mem 9.8 GB  skipped 0"
        )
    )


def test_a_narrow_terminal_gets_what_matters_most():
    for width in range(60, 130):
        line = standing(skipped=3).line(width)
        assert len(line) <= width
        assert "step 1200/50000  loss 3.412" in line
        assert "skipped 3" in line or width < 70
        assert "ETA" in line
    assert standing().line(10) == "step 1200/50000  loss 3.412"


class Stream(io.StringIO):
    """A terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_terminal_is_redrawn_and_a_file_gets_lines():
    terminal, file = Stream(True), Stream(False)
    for stream in (terminal, file):
        console = Console(stream)
        console.show(standing())
        console.show(standing(step=1201))
        console.say("a message")
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r\x1b[K") == 3
    assert [line.split()[1] for line in file.getvalue().splitlines()] == [
        "1200/50000", "1201/50000", "message",
    ]  # fmt: skip


def test_a_terminal_that_dies_or_knows_no_snowman_stops_nothing():
    closed = Stream(False)
    console = Console(closed)
    closed.close()
    console.say("into the void")
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(plain).say("a \u2603")
    assert plain.buffer.getvalue() == b"a ?\n"


def test_numbers_are_short():
    assert [short_time(s) for s in (8, 245, 11_520, 183_600)] == ["8s", "4m 5s", "3h 12m", "2d 3h"]
    assert [short_count(n) for n in (7, 41_234, 2.5e6)] == ["7", "41.2k", "2.5M"]
    assert [short_rate(r) for r in (3e-4, 1e-3, 0.0)] == ["3.0e-4", "1.0e-3", "0.0e0"]
