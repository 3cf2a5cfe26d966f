"""Everything that reads a file of a run or a model, and how little each may take to refuse one."""

import json
import signal
import time
import tracemalloc
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from golden import GOLDEN
from made_runs import command

from fastbrain import TokenFile, TransformerLm
from fastbrain.commands import inspect, verify
from fastbrain.errors import FastBrainError
from fastbrain.formats import rbw
from fastbrain.formats.hf_import import Directory
from fastbrain.formats.safetensors_file import check_safetensors_header
from fastbrain.tokens.sidecar import Sidecar
from fastbrain.tokens.tokenizer import load_tokenizer
from fastbrain.training import config_files, data, guard_log, manifest, metrics
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings

MOST_SECONDS = 1.0
MOST_BYTES = 50e6

Read = Callable[[Path], object]

NEWEST = "checkpoints/step-00000006"


def fault(run: Path) -> None:
    """Of the newest checkpoint; whatever is found is a sentence."""
    opened = run / NEWEST
    owner = json.loads((run / "checkpoints/step-00000003/MANIFEST.json").read_bytes())["run_id"]
    reason = manifest.fault(opened, owner, 6)
    assert reason is None or (isinstance(reason, str) and len(reason) < 1_000)
    manifest.owner(opened)


def open_corpus(run: Path) -> None:
    settings = Settings.from_tables(config_files.read_tables(str(run / "plain.toml")))
    corpus = data.open_corpus(settings, run / "data")
    corpus.train.close()
    corpus.held_out.close()


def restored_moments(path: Path) -> None:
    model = TransformerLm(GOLDEN)
    model.load_optimizer_state(path)


# what reads each file: given the run, or the file
READERS: dict[str, list[Read]] = {
    f"{NEWEST}/MANIFEST.json": [fault],
    f"{NEWEST}/trainer_state.json": [fault],
    f"{NEWEST}/config.json": [fault, lambda run: Directory.open(run / NEWEST)],
    f"{NEWEST}/model.safetensors": [
        fault,
        lambda run: check_safetensors_header(run / NEWEST / "model.safetensors"),
        lambda run: Directory.open(run / NEWEST),
    ],
    "config.toml": [RunDir.open, lambda run: config_files.read_tables(str(run / "config.toml"))],
    "data/corpus.json": [open_corpus],
    "data/tokenizer.json": [lambda run: load_tokenizer(run / "data")],
    "corpus.bin.json": [lambda run: Sidecar.read(run / "corpus.bin")],
    "corpus.bin": [lambda run: TokenFile.open(run / "corpus.bin", seed=1).close()],
    "metrics.jsonl": [lambda run: metrics.read(run / "metrics.jsonl")],
    "guard.jsonl": [
        lambda run: guard_log.read(run / "guard.jsonl"),
        lambda run: guard_log.rollbacks(run / "guard.jsonl"),
    ],
    "model.rbw": [lambda run: rbw.read_header(run / "model.rbw")],
    "model.opt": [lambda run: restored_moments(run / "model.opt")],
}


def looked_at(run: Path, name: str, capsys) -> None:
    """Read the file in every way there is; only our own errors may come of it."""
    with warnings.catch_warnings():
        # of bytes past the end
        warnings.simplefilter("ignore")
        for read in READERS[name]:
            with suppress(FastBrainError):
                read(run)
        places = (run / name, (run / name).parent, run)
        codes = [command(inspect, place) for place in places]
        codes += [command(verify, place) for place in (run, run / NEWEST)]
    assert set(codes) <= {0, 1, 2, 3}
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert len(said.out) + len(said.err) < 100_000
    assert all(each.isprintable() or each == "\n" for each in said.out)


class Hangs(BaseException):
    """Of no kind that anything under test would take for its own."""


def _hangs(*_: object) -> None:
    raise Hangs


def measured(work: Callable[[], object], times: int = 1) -> None:
    """Run `work` in little time and memory; it does `times` things that may each take as much."""
    started = time.process_time()
    # what hangs is cut off, and told by its stack
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(10 * times)
    try:
        work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - started < times * MOST_SECONDS
    tracemalloc.start()
    try:
        work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
