"""Runs of every format that was released go on, and a format of the future is refused by name.

fixtures/run-format-1 is such a run: what `fastbrain train` left after step 3 of 6 (a mixture of
two experts with its tokenizer; MANIFEST, config and trainer state of format 1), with the rows that
steps 4 to 6 had in metrics.jsonl.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
from training_runs import checkpoint

from fastbrain import atomic, cli
from fastbrain.training import chart, manifest
from fastbrain.training.run_dir import RunDir

FIXTURES = Path(__file__).parent / "fixtures"
RELEASED = sorted(path.name for path in FIXTURES.glob("run-format-*"))


@pytest.fixture(params=RELEASED)
def run(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / request.param, "run")
    # a second of work that is looked at elsewhere
    monkeypatch.setattr(chart, "draw", lambda *_: "not drawn")
    return Path("run")


def rows(run: Path, start: int) -> list[tuple[int, str, float]]:
    """What a start wrote: (step, what, loss)."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (row["step"], key, row[key])
        for row in found
        if row["start"] == start
        for key in ("loss", "val_loss")
        if key in row
    ]


def test_every_format_has_its_run():
    assert f"run-format-{manifest.FORMAT_VERSION}" in RELEASED


def test_a_run_of_a_released_format_goes_on(run, capsys):
    assert cli.main(["resume", "run"]) == 0
    said = capsys.readouterr()
    assert "going on from run/checkpoints/step-00000003" in said.out
    assert not said.err
    before = [row for row in rows(run, 1) if row[0] > 3]
    after = rows(run, 2)
    assert [row[:2] for row in after] == [row[:2] for row in before]
    assert len(after) == 4
    # another machine sums in another order
    for (*_, then), (*_, now) in zip(before, after, strict=True):
        assert math.isclose(now, then, rel_tol=1e-3)
    assert manifest.fault(checkpoint("run", 6), RunDir.open(run).run_id, 6) is None


def config(run: Path, version: str) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("format_version = 1", f"format_version = {version}"))


def relisted(run: Path, version: str) -> None:
    directory = checkpoint(str(run), 3)
    found = json.loads((directory / manifest.NAME).read_bytes()) | {
        "format_version": json.loads(version)
    }
    state = directory / "trainer_state.json"
    found["files"]["trainer_state.json"] = {
        "bytes": state.stat().st_size,
        "sha256": atomic.sha256_of(state),
    }
    del found["self"]
    found["self"] = manifest._digest(found)
    (directory / manifest.NAME).write_text(json.dumps(found))


def trainer_state(run: Path, version: str) -> None:
    path = checkpoint(str(run), 3) / "trainer_state.json"
    path.write_text(path.read_text().replace('"format_version": 1', f'"format_version": {version}'))
    relisted(run, "1")


@pytest.mark.parametrize("version", ["2", "41"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (config, "run/config.toml"),
        (relisted, "run/checkpoints/step-00000003"),
        (trainer_state, "run/checkpoints/step-00000003/trainer_state.json"),
    ],
    ids=["config", "manifest", "trainer-state"],
)
def test_a_newer_format_is_refused_by_name_and_not_taken_for_damage(
    run, change, named, version, capsys
):
    change(run, version)
    before = sorted(path for path in run.rglob("*") if path.name != "run.lock")
    assert cli.main(["resume", "run"]) == 2
    said = capsys.readouterr().err
    assert f"{named} is of format {version}" in said
    assert "fastbrain that wrote it" in said
    assert said.count("\n") == 1
    assert sorted(path for path in run.rglob("*") if path.name != "run.lock") == before


def test_an_unknown_format_of_a_run_is_refused_by_name(run, capsys):
    config(run, '"one"')
    assert cli.main(["resume", "run"]) == 2
    assert "run/config.toml is of format 'one'" in capsys.readouterr().err
