"""A run that is asked to stop saves within a step and can be resumed, whoever asks and how."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from training_runs import bits, checkpoint, entered, run

from fastbrain import cli
from fastbrain.training.loop import Trainer
from fastbrain.training.requests import Requests

# as the tests themselves: threads that wait for busy cores take far longer
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("requests")) as folder:
        assert run("whole") == 0
        yield folder


def at_step(monkeypatch, step: int, act) -> None:
    real = Trainer._train_step

    def acted(trainer: Trainer) -> None:
        real(trainer)
        if trainer.state.step == step:
            act()

    monkeypatch.setattr(Trainer, "_train_step", acted)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_once_and_the_run_can_go_on(monkeypatch, capsys, number):
    name = f"stopped-{number}"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        assert run(name) == 75
    assert signal.getsignal(number) is before
    said = capsys.readouterr().out
    assert f"{signal.Signals(number).name}: stopping after this step" in said
    assert f"fastbrain resume {name}" in said
    assert [path.name for path in Path(name, "checkpoints").iterdir()] == ["step-00000002"]
    assert cli.main(["resume", name]) == 0
    assert bits(name, 6) == bits("whole", 6)


def test_a_second_ctrl_c_leaves_at_once(monkeypatch, capsys):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)  # a closing terminal may send several
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        at_step(patch, 4, twice)
        assert run("left") == 130
    said = capsys.readouterr()
    assert said.out.count("stopping after this step") == 1
    assert "interrupted; the last checkpoint is left/checkpoints/step-00000003" in said.err
    assert not checkpoint("left", 4).exists()
    assert cli.main(["resume", "left"]) == 0
    assert bits("left", 6) == bits("whole", 6)


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Requests(tmp_path, print) as requests:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not requests.stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_file_stops_and_is_used_up(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: Path("paused/STOP").touch())
        assert run("paused") == 75
    assert "found STOP: stopping after this step" in capsys.readouterr().out
    assert not Path("paused/STOP").exists()
    # one that was left from before does not stop the next start
    Path("paused/STOP").touch()
    assert cli.main(["resume", "paused"]) == 0
    assert bits("paused", 6) == bits("whole", 6)


def test_a_save_file_saves_and_the_run_goes_on(monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: Path("asked/SAVE").touch())
        assert run("asked") == 0
    assert not Path("asked/SAVE").exists()
    assert sorted(path.name for path in Path("asked/checkpoints").iterdir()) == [
        "step-00000003", "step-00000004", "step-00000006",
    ]  # fmt: skip
    assert bits("asked", 6) == bits("whole", 6)


def test_pause_asks_a_run_that_is_there(monkeypatch, capsys):
    assert cli.main(["pause", "nowhere"]) == 2
    assert "there is no run at nowhere" in capsys.readouterr().err
    assert cli.main(["pause", "whole"]) == 2
    assert "nobody is training whole now" in capsys.readouterr().err
    assert not Path("whole/STOP").exists()
    codes = []
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: codes.append(cli.main(["pause", "told", "--json"])))
        assert run("told") == 75
    assert codes == [0]
    assert '{"run": "told", "stopped": false}' in capsys.readouterr().out
    waited = []
    with monkeypatch.context() as patch:
        thread = threading.Thread(
            target=lambda: waited.append(cli.main(["pause", "told", "--wait", "30"]))
        )
        at_step(patch, 3, thread.start)
        # the file may be found a step or two later
        real = Trainer._after_step
        patch.setattr(
            Trainer,
            "_after_step",
            lambda trainer, wanted: (
                real(trainer, wanted),
                [thread.join(0.02) for _ in range(500) if not Path("told/STOP").exists()],
            ),
        )
        assert cli.main(["resume", "told", "train.max_time=1h"]) == 75
        thread.join()
    assert waited == [0]


@pytest.mark.slow
def test_fifty_random_signals_to_real_processes(tmp_path):
    """Each within a step and a save; every start goes on where the last one stopped."""
    import random
    import time

    generator = random.Random(7)
    whole = bits("whole", 6)
    program = "import sys; from fastbrain import train; sys.exit(train.main(sys.argv[1:]))"
    stopped = 0
    for trial in range(50):
        name = f"signal-{trial}"
        number = generator.choice(SIGNALS)
        # slow enough to be hit: an evaluation with samples after every step
        child = subprocess.Popen(
            [sys.executable, "-c", program, "tiny.toml", "--run", name, "eval.interval=1",
             "eval.samples=8", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD,
        )  # fmt: skip
        assert child.stderr is not None
        while "6 steps of" not in child.stderr.readline():
            pass
        time.sleep(generator.uniform(0.05, 0.4))
        child.send_signal(number)
        said, errors = child.communicate(timeout=60)
        assert child.returncode in (0, 75), errors
        if child.returncode == 75:
            stopped += 1
            assert checkpoint(name, json.loads(said)["step"]).is_dir()
            assert cli.main(["resume", name]) == 0
        assert bits(name, 6) == whole
    assert stopped >= 25


def test_a_terminal_that_is_gone_stops_nothing(tmp_path):
    """Both outputs are pipes that nobody reads any more."""
    program = "import sys; from fastbrain import train; sys.exit(train.main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "tiny.toml", "--run", "unheard"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ONE_THREAD,
    )
    child.stdout.close()
    child.stderr.close()
    assert child.wait(60) == 0
    assert bits("unheard", 6) == bits("whole", 6)
