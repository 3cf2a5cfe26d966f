"""One history out of rows that were torn, repeated and superseded."""

import json
import sys

import pytest

from fastbrain.training import chart, metrics
from fastbrain.training.metrics import Metrics


def silent(sentence: str) -> None:
    raise AssertionError(sentence)


def write(path, steps, warn=silent) -> Metrics:
    """One start of a run: a row for each step, or an evaluation where it is negative."""
    writer = Metrics(path, warn)
    writer.append(
        {"step": step, "loss": 1.0 / step} if step > 0 else {"step": -step, "val_loss": 2.0}
        for step in steps
    )
    return writer


def history(path) -> list[tuple[int, int, str]]:
    return [
        (row["step"], row["start"], "loss" if "loss" in row else "val")
        for row in metrics.read(path)
    ]


def test_every_step_is_there_once_and_from_the_newest_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4, -4, 5, 6])
    write(path, [5, 6, 7])  # resumed from 4
    write(path, [6, 7, -7])  # resumed from 5
    assert history(path) == [
        (1, 1, "loss"), (2, 1, "loss"), (3, 1, "loss"), (4, 1, "loss"), (4, 1, "val"),
        (5, 2, "loss"), (6, 3, "loss"), (7, 3, "loss"), (7, 3, "val"),
    ]  # fmt: skip


def test_steps_not_reached_again_yet_are_history_given_up(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4, -4, 5])
    write(path, [3])  # went back to 2
    assert history(path) == [(1, 1, "loss"), (2, 1, "loss"), (3, 2, "loss")]


def test_an_evaluation_that_a_resume_repeats_belongs_to_the_step_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    write(path, [-2, 3])
    assert history(path) == [(1, 1, "loss"), (2, 1, "loss"), (2, 2, "val"), (3, 2, "loss")]
    write(path, [-2, 3])
    assert history(path) == [(1, 1, "loss"), (2, 1, "loss"), (2, 3, "val"), (3, 3, "loss")]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [step for step, _, _ in history(path)] == [1, 2]
    write(path, [3])
    assert history(path) == [(1, 1, "loss"), (2, 1, "loss"), (3, 2, "loss")]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_line_that_is_no_row_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    with path.open("ab") as file:
        file.write(b'\0\0\0\n{"step": 2\n[3]\n\n')
    write(path, [2])
    assert history(path) == [(1, 1, "loss"), (2, 2, "loss")]


def test_what_is_not_a_number_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Metrics(path, silent).append([{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}])
    assert metrics.read(path) == [{"start": 1, "step": 1, "loss": None, "grad_norm": None}]


def test_a_dead_disk_warns_once(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    said: list[str] = []
    writer = write(folder / "metrics.jsonl", [1], said.append)
    (folder / "metrics.jsonl").unlink()
    folder.rmdir()
    for step in (2, 3):
        writer.append([{"step": step, "loss": 1.0}])
        writer.sync()
    assert len(said) == 1
    assert "cannot be written (No such file or directory); training goes on" in said[0]


def test_the_picture_shows_both_curves(tmp_path):
    pytest.importorskip("matplotlib")
    rows: list[metrics.Row] = [{"step": step, "loss": 5.0 / step} for step in range(1, 60)]
    rows += [{"step": 30, "val_loss": 1.0}, {"step": 31, "loss": None}]
    picture = tmp_path / "loss.png"
    assert chart.draw(rows, picture, "a run") is None
    from PIL import Image

    with Image.open(picture) as image:
        data = image.convert("RGB").resize((540, 300)).tobytes()
        assert image.size == (1080, 600)
    pixels = list(zip(data[::3], data[1::3], data[2::3], strict=True))
    assert sum(r > 180 and g < 110 and b < 110 for r, g, b in pixels) > 5  # the marker
    assert sum(b > r + 40 for r, _, b in pixels) > 50  # the line


def test_no_picture_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(chart, "find_spec", lambda name: True)
    assert "fewer than two steps" in str(chart.draw([], tmp_path / "loss.png", ""))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    sentence = chart.draw([], tmp_path / "loss.png", "")
    assert sentence == (
        "loss.png is not drawn: matplotlib is missing (pip install fastbrain[plot])"
    )
    assert not (tmp_path / "loss.png").exists()
