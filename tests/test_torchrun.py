"""Started by torchrun itself: `python -m torch.distributed.run`, processes that import for real."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_jobs import words
from ranks import needs_fork, together
from training_runs import bits, checkpoint, entered, numbers

from fastbrain import cli

pytestmark = needs_fork

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f".:{ROOT}"}
RUN = words("")[4:]

# trains like fastbrain.train, but once one of its ranks is killed before step 5
KILLED_ONCE = """
import os
import signal
import sys
from pathlib import Path

from fastbrain import train
from fastbrain.training.loop import Trainer

step = Trainer._train_step


def killed_once(trainer):
    if trainer.ranks.rank == RANK and trainer.state.step == 4 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    step(trainer)


Trainer._train_step = killed_once
sys.exit(train.main())
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("torchrun")) as folder:
        found = together("fault_jobs:program", words("whole"))
        assert [each.code for each in found] == [0, 0], found
        yield folder


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Begin `torchrun --nproc-per-node 2` with these arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def torchrun(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Run it to its end, which must be with this exit code; what was printed, and the errors."""
    child = start(arguments)
    try:
        out, err = child.communicate(timeout=180)
    finally:
        child.kill()
    assert child.returncode == code, out + err
    return out, err


def test_the_program_runs_under_torchrun_and_one_rank_prints():
    out, _ = torchrun("-m", "fastbrain.train", "tiny.toml", "--run-dir", "plain", *RUN, "--json")
    assert json.loads(out)["step"] == 6
    assert bits("plain", 6) == bits("whole", 6)
    assert numbers("plain") == numbers("whole")


@pytest.mark.slow
def test_the_verbs_stop_and_resume_under_torchrun():
    begin = ("-m", "fastbrain", "train", "tiny.toml", "--run-dir", "verbs", *RUN)
    out, err = torchrun(*begin, "train.max_time=0.001s", code=1)
    # torchrun's own exit code of whatever is not 0
    assert re.search(r"exitcode\s*: 75", err)
    assert out.count("6 steps of 128 tokens") == out.count("stopped: ") == 1
    assert "go on with     torchrun --nproc-per-node 2 -m fastbrain resume verbs" in out
    out, _ = torchrun("-m", "fastbrain", "resume", "verbs", "train.max_time=1h")
    assert out.count("done: 6 of 6 steps") == 1
    assert bits("verbs", 6) == bits("whole", 6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_started_again_and_nothing_is_lost(rank):
    Path("died").unlink(missing_ok=True)
    Path("killed_once.py").write_text(KILLED_ONCE.replace("RANK", str(rank)))
    name = f"restarted-{rank}"
    begin = ("-m", "killed_once", "tiny.toml", "--run-dir", name, *RUN)
    out, _ = torchrun("--max-restarts=1", *begin)
    assert Path("died").exists()
    assert out.count("going on from ") == 1
    assert out.count("done: 6 of 6 steps") == 1
    assert bits(name, 6) == bits("whole", 6)
    assert numbers(name) == numbers("whole")
    assert not list(Path(name).rglob(".tmp-*"))


@pytest.mark.slow
def test_a_stop_with_restarts_left_is_not_started_again():
    begin = ("-m", "fastbrain.train", "tiny.toml", "--run-dir", "left", *RUN)
    out, _ = torchrun("--max-restarts=2", *begin, "train.max_time=0.001s")
    assert out.count("stopped: ") == 1
    assert "going on from" not in out


@pytest.mark.slow
def test_a_restart_does_not_go_on_with_a_run_that_was_there_before():
    before = bits("whole", 6), numbers("whole")
    begin = ("-m", "fastbrain.train", "tiny.toml", "--run-dir", "whole", *RUN)
    _, err = torchrun("--max-restarts=1", *begin, code=1)
    assert err.count("there is a run at whole already") == 2
    assert (bits("whole", 6), numbers("whole")) == before


@pytest.mark.slow
def test_a_second_torchrun_is_told_who_trains_the_run():
    Path("long").mkdir()
    long = ("train.max_steps=100000", "eval.interval=100000", "save.interval_steps=100000")
    begin = ("-m", "fastbrain.train", "tiny.toml", "--run-dir", "long", *RUN, *long)
    child = start(begin)
    try:
        assert child.stdout is not None
        while not child.stdout.readline().startswith("step "):
            assert child.poll() is None
        holder = json.loads(Path("long/run.lock").read_text())["pid"]
        _, err = torchrun("-m", "fastbrain", "resume", "long", code=1)
        assert f"is being trained by process {holder} on" in err
        assert err.count("is being trained by") == 1
        assert re.search(r"exitcode\s*: 4", err)
        # Ctrl-C, which torchrun hands on; it kills what has not ended 30 s later
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert time.monotonic() - began < 30
    assert child.returncode != 0
    stopped = re.search(r"stopped: (\d+) of 100000 steps", out)
    assert stopped is not None
    assert checkpoint("long", int(stopped[1])).is_dir()
    assert cli.main(["verify", "long"]) == 0


@pytest.mark.slow
def test_help_and_slips_are_printed_once_under_torchrun():
    out, _ = torchrun("-m", "fastbrain.train", "--help")
    assert out.count("usage: ") == 1
    _, err = torchrun("-m", "fastbrain.train", "tiny.toml", "--strange", code=1)
    assert err.count("unrecognized arguments: --strange") == 1
    assert re.search(r"exitcode\s*: 2", err)
