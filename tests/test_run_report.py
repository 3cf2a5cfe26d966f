"""The page of a run: what it says is so, whatever is missing or hostile, and it fetches nothing."""

import argparse
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from training_runs import checkpoint, entered, run

from fastbrain.commands import report
from fastbrain.training import lock, manifest, metrics
from fastbrain.training.report import story
from fastbrain.training.report.words import size, text
from fastbrain.training.run_dir import RunDir

TABLES = {
    "model": {"vocab_size": 61},
    "data": {"train": "corpus.bin", "seq_len": 16},
    "train": {"max_steps": 1000, "global_batch_size": 8, "seed": 7},
}


class Page(HTMLParser):
    """A page as a browser reads it: its text, its elements, and what it would fetch or run."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.suspicious: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta" and not (tag == "path" and self.get_starttag_text().endswith("/>")):
            self.open.append(tag)
        for name, found in attrs:
            if name in ("src", "href", "srcset", "action") or name.startswith("on"):
                self.suspicious.append(f"{tag} {name}={found}")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps, with checkpoints of 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    with entered(folder):
        assert run("tiny") == 0
    return folder / "tiny"


@pytest.fixture
def tiny(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture
def bare(tmp_path):
    """A run whose config.toml was just written."""
    return RunDir.create(tmp_path / "bare", TABLES).path


def ask(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(each) for each in arguments]))


def page(path: Path, *arguments: str) -> Page:
    assert ask(path, *arguments) == 0
    return Page((path / "report.html").read_text(encoding="utf-8"))


def log(path: Path, *rows: dict) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def step(number: int, start: int = 1, **more) -> dict:
    row = {"start": start, "step": number, "time_s": number / 2, "loss": 5 - number / 1000}
    row |= {"grad_norm": 1.5, "learning_rate": 1e-3, "tokens": 128 * number, "skipped": 0}
    return row | {"tokens_per_s": 2560.0, "peak_bytes": 5 << 30} | more


def bad(number: int, kind: str = "spike", **more) -> dict:
    row = {"start": 1, "kind": kind, "step": number, "data_step": number - 1, "loss": 9.5}
    row |= {"grad_norm": 7.25, "loss_limit": 4.125, "norm_limit": 2.5, "offsets": [1, 2]}
    return row | {"micro": 0, "rows": [{"row": 0, "offset": 77, "text": "some text"}]} | more


def test_a_finished_run(tiny, capsys):
    shown = page(tiny)
    assert shown.said.startswith("tiny tiny done Trained to the end.")
    assert "step 6 of 6" in shown.said
    assert "tokens 768 of 768" in shown.said
    assert shown.said.count(" valid ") == 2
    losses = {
        row["step"]: row["val_loss"]
        for row in metrics.read(tiny / "metrics.jsonl")
        if "val_loss" in row
    }
    best = min(losses, key=losses.get)
    assert f"held-out loss {losses[6]:.4f} best {losses[best]:.4f} at step {best}" in shown.said
    assert re.search(rf"{best} valid best ", shown.said)
    # machine, data, settings, and how to get it again
    state = json.loads((checkpoint(str(tiny), 6) / "trainer_state.json").read_text())
    assert state["versions"]["torch"] in shown.said
    assert state["data"]["train"]["sha256"] in shown.said
    assert "global_batch_size 8" in shown.said
    assert f"OMP_NUM_THREADS=1 fastbrain train {tiny}/config.toml --run {tiny}-again" in shown.said
    assert "| sha256sum --check" in shown.said
    assert "fastbrain resume" not in shown.said
    assert capsys.readouterr().out.startswith(f"report: {tiny / 'report.html'} (")


def test_it_fetches_nothing_and_runs_one_script(tiny):
    shown = page(tiny)
    assert not shown.suspicious
    assert not {"link", "iframe", "img", "object", "base"} & set(shown.tags)
    content = (tiny / "report.html").read_text()
    assert "default-src 'none'" in content
    assert "://" not in re.sub(r"http://www\.w3\.org/\S+", "", content)
    assert "@import" not in content
    assert "url(" not in content


def test_json_and_out(tiny, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert ask(tiny, "--out", out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(out)
    assert said["bytes"] == out.stat().st_size
    assert (said["standing"], said["step"], said["steps"]) == ("done", 6, 6)
    assert (said["checkpoint"], said["damaged"]) == (6, [])
    assert not (tiny / "report.html").exists()


@pytest.mark.parametrize(
    "gone", ["metrics.jsonl", "guard.jsonl", "checkpoints", "samples", "data", "run.lock"]
)
def test_whatever_is_missing_there_is_a_page(tiny, gone):
    target = tiny / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    shown = page(tiny)
    assert "Curves" in shown.said
    assert ("No step has been logged yet." in shown.said) == (gone == "metrics.jsonl")


def test_a_run_that_has_only_a_config(bare):
    (bare / "checkpoints").rmdir()
    (bare / "samples").rmdir()
    shown = page(bare)
    assert "not begun No step has been finished yet." in shown.said
    assert "step 0 of 1,000" in shown.said
    assert shown.said.count("None has been written yet.") == 2
    assert "No tokens have been prepared yet." in shown.said


def test_a_config_that_is_refused_is_shown_all_the_same(tmp_path):
    path = RunDir.create(tmp_path / "odd", {"train": {"learning_rat": "x<y"}}).path
    log(path / "metrics.jsonl", step(1))
    shown = page(path)
    assert "learning_rat x<y" in shown.said
    assert "tokens 128" in shown.said


def test_it_is_said_who_trains(bare):
    log(bare / "metrics.jsonl", *map(step, range(1, 101)))
    held = lock.Lock.acquire(bare)
    who = lock.holder(bare)
    shown = page(bare)
    assert f"running Being trained now by process {who['pid']} on {who['host']}." in shown.said
    assert "tokens/s 2,560 45s left at this speed" in shown.said
    held.release()
    # probing let go of it
    lock.Lock.acquire(bare).release()
    assert "stopped There is no checkpoint to go on from: a resume begins again." in page(bare).said


def test_damage_is_named_and_looking_can_be_left_out(tiny):
    path = checkpoint(str(tiny), 6) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shown = page(tiny)
    assert "damaged model.safetensors was changed after it was written" in shown.said
    assert "stopped A resume goes on from step 3 and repeats 3 steps." in shown.said
    shown = page(tiny, "--no-verify")
    assert shown.said.count("not verified") == 2
    assert "damaged" not in shown.said


def test_nothing_intact_is_said(tiny):
    for number in (3, 6):
        (checkpoint(str(tiny), number) / "MANIFEST.json").unlink()
    assert "stopped No checkpoint is intact" in page(tiny).said


def test_what_was_put_aside_is_listed_by_that_word(tiny):
    folder = tiny / "checkpoints"
    (folder / "step-00000006").rename(folder / "step-00000006.corrupt")
    shutil.copytree(folder / "step-00000003", folder / "step-00000005.0a1b2c3d.superseded")
    (folder / ".tmp-step-9-1-00").mkdir()
    shown = page(tiny)
    assert re.search(r"6 corrupt [\d.]+ KB", shown.said)
    assert re.search(r"5 superseded [\d.]+ KB", shown.said)
    assert ".tmp-" not in shown.said
    assert "goes on from step 3" in shown.said


def test_a_checkpoint_that_vanishes_is_not_listed(tiny, monkeypatch):
    def vanishing(directory, run_id, number):
        shutil.rmtree(directory)
        return "it has no MANIFEST.json"

    monkeypatch.setattr(manifest, "fault", vanishing)
    assert "None has been written yet." in page(tiny).said


def test_hostile_text_stays_text(bare):
    evil = "</pre><script>alert(1)</script>\"' onload=x \u202e\x00\x1b[31m\ud800 &amp;"
    log(bare / "metrics.jsonl", *map(step, range(1, 20)))
    log(bare / "guard.jsonl", bad(7, rows=[{"row": evil, "offset": evil, "text": evil}]))
    log(bare / "guard.jsonl", {"start": 1, "kind": evil, "step": 8})
    (bare / "samples" / "step-00000005.txt").write_text(evil.replace("\ud800", ""))
    lock.Lock.acquire(bare).release()
    (bare / "run.lock").write_text(json.dumps({"pid": evil, "host": evil}))
    shown = page(bare)
    assert shown.tags.count("script") == 5
    assert not shown.suspicious
    assert r"<script>alert(1)</script>" in shown.said
    assert r"\u202e\u0000\u001b[31m\ud800 &amp;" in shown.said


def test_a_hostile_name_stays_a_name(tmp_path):
    shown = page(RunDir.create(tmp_path / "a<b>&amp;", TABLES).path)
    assert "b" not in shown.tags
    assert shown.said.startswith("a<b>&amp; a<b>&amp; not begun")


def test_numbers_that_are_none(bare):
    odd = [math.nan, None, "x", [], {}, True, 10**400, -1, 0]
    for index, each in enumerate(odd):
        log(
            bare / "metrics.jsonl",
            step(index + 1, loss=each, grad_norm=each, learning_rate=each, tokens_per_s=each)
            | {"time_s": each, "tokens": each, "skipped": each, "peak_bytes": each},
            {"start": 1, "step": index + 1, "val_loss": each},
        )
        limits = {"loss": each, "grad_norm": each, "loss_limit": each, "norm_limit": each}
        log(bare / "guard.jsonl", bad(index + 1, "skip", rows=each, **limits))
        ends = {"first": index, "last": each, "reloaded": each}
        log(bare / "guard.jsonl", bad(index + 1, "rollback", **ends))
    log(bare / "metrics.jsonl", step(99) | {"step": 10**400})
    shown = page(bare)
    assert "nan" not in shown.said
    assert "not finite" in shown.said


def test_spikes_skips_and_rollbacks_are_marked_and_listed(bare):
    log(bare / "metrics.jsonl", *map(step, range(1, 101)))
    log(bare / "guard.jsonl", bad(30), bad(40, "skip", loss=None, grad_norm=None))
    back = {"start": 1, "kind": "rollback", "step": 60, "first": 51, "last": 59, "reloaded": 50}
    log(bare / "guard.jsonl", back)
    shown = page(bare)
    assert "1 spike, 1 skip, 1 rollback" in shown.said
    assert "30 spike 9.5000 4.1250 7.25 2.5 some text row 0, from token 77" in shown.said
    assert "40 skip not finite 4.1250 not finite 2.5" in shown.said
    assert "Steps 52 to 60 were given up" in shown.said
    assert "the run went on from step 50" in shown.said
    content = (bare / "report.html").read_text()
    assert content.count('class="mark spike"') == content.count('class="mark skip"') == 1
    # a stretch on every chart
    # step 52 of 1 to 100
    assert content.count('<rect class="rollback" x="515.2"') == 4


def test_the_newest_fifty_are_shown_and_all_are_counted(bare):
    log(bare / "metrics.jsonl", *map(step, range(1, 3001)))
    log(bare / "guard.jsonl", *(bad(number) for number in range(1, 3001)))
    shown = page(bare)
    assert "3,000 spikes; the newest 50 are shown" in shown.said
    assert shown.said.count("some text row 0") == 50
    assert "2,951 spike" in shown.said
    assert "2,950 spike" not in shown.said
    content = (bare / "report.html").read_text()
    assert 100 < content.count('class="mark spike"') <= 401


def test_starts_their_times_and_the_clock_that_a_rollback_does_not_restart(bare):
    log(bare / "metrics.jsonl", *(step(each, time_s=each) for each in range(1, 101)))
    log(bare / "metrics.jsonl", *(step(each, 2, time_s=each - 80) for each in range(81, 201)))
    # an evaluation has no clock
    log(bare / "metrics.jsonl", {"start": 2, "step": 200, "val_loss": 3.0})
    # the clock goes on: 120 s at the end of start 2
    log(bare / "metrics.jsonl", *(step(each, 3, time_s=each - 30) for each in range(151, 191)))
    log(bare / "guard.jsonl", bad(200, "rollback", start=2, first=155, last=199))
    shown = page(bare)
    found = story.read(RunDir.open(bare), verify=False)
    assert [each.rolled_back for each in found.starts] == [False, False, True]
    assert [each[:4] for each in found.starts] == [
        (1, 1, 100, 100),
        (2, 81, 200, 120),
        (3, 151, 190, 160),
    ]
    assert found.seconds == 100 + 160
    assert "time trained 4m 20s in 2 starts" in shown.said
    assert (
        "3 after a rollback 151 190 40 2m 40s 2 resumed 81 200 70 2m 0s 1 begun 1 100 80 1m 40s"
        in shown.said
    )
    assert (bare / "report.html").read_text().count('<path class="start"') == 4


def test_a_resume_that_carries_a_rollback_out_has_a_clock_of_its_own(bare):
    log(bare / "metrics.jsonl", *(step(each, time_s=each) for each in range(1, 101)))
    log(bare / "guard.jsonl", bad(100, "rollback", first=90, last=99))
    log(bare / "metrics.jsonl", *(step(each, 2, time_s=each - 80) for each in range(81, 111)))
    found = story.read(RunDir.open(bare), verify=False)
    assert not found.starts[1].rolled_back
    assert found.seconds == 100 + 30


def test_samples_newest_first_and_not_all(bare):
    for number in range(1, 61):
        (bare / "samples" / f"step-{number:08d}.txt").write_text(f"[prompt {number}] and more")
    (bare / "samples" / ".tmp-step-00000099.txt").write_text("torn")
    (bare / "samples" / "step-00000061.txt").write_bytes(b"\xff" * 100_000)
    shown = page(bare)
    assert "The newest 40 of 61" in shown.said
    assert "step 60 prompt 60 and more" in shown.said
    assert "prompt 21 " not in shown.said
    assert "torn" not in shown.said
    assert (bare / "report.html").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda run: shutil.rmtree(run), "there is no run at"),
        (lambda run: (run / "config.toml").write_text("x ="), "is not the configuration of a run"),
        (
            lambda run: (run / "config.toml").write_text('format_version = 9\nrun_id = "a"'),
            "is of format 9",
        ),
        (lambda run: (run / "report.html").mkdir(), "not a plain file"),
        (lambda run: (run / "metrics.jsonl").mkdir(), "cannot read"),
    ],
)
def test_refusals_are_a_sentence(bare, prepare, said, capsys):
    prepare(bare)
    assert ask(bare) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastbrain: ")
    assert said in error


def test_reading_changes_nothing(tiny):
    def state():
        return {
            path.relative_to(tiny): path.read_bytes() if path.is_file() else None
            for path in tiny.rglob("*")
            if path.name != "report.html"
        }

    before = state()
    page(tiny)
    assert state() == before


@pytest.mark.slow
def test_a_week_makes_a_page_below_two_megabytes(bare):
    with (bare / "metrics.jsonl").open("w") as file:
        for number in range(1, 500_001):
            file.write(json.dumps(step(number, loss=3 + math.sin(number))) + "\n")
            if number % 500 == 0:
                file.write(json.dumps({"start": 1, "step": number, "val_loss": 3.0}) + "\n")
    log(bare / "guard.jsonl", *(bad(number) for number in range(1, 500_001, 50)))
    page(bare)
    assert (bare / "report.html").stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("<&>\"'", "&lt;&amp;&gt;&quot;&#x27;"),
        ("a\x00b", r"a\u0000b"),
        ("\u202e", r"\u202e"),
        ("a\n\tb", "a\n\tb"),
    ],
)
def test_text(raw, shown):
    assert text(raw) == shown


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 KB"), (4_091_000_000, "4.09 GB")],
)
def test_sizes(count, said):
    assert size(count) == said
