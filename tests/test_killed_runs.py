"""A run that is killed, however often and wherever, comes back to the last bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.campaigns import __main__ as campaigns
from bench.campaigns import syscall_kills

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def killed(tmp_path: Path, *words: str) -> dict:
    """What a campaign found, which must have lost nothing."""
    out = tmp_path / "kills.json"
    # in a process of its own: it forks, and this one may have threads
    command = [sys.executable, "-m", "bench.campaigns.kill_runs", "--scratch", tmp_path]
    done = subprocess.run(
        [*command, "--out", out, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_bytes())
    for part in ("random", "operations", "calls"):
        if part in found:
            assert found[part]["bit_equal"] == found[part]["kills"] > 0
    return found


def test_runs_killed_at_random_moments_come_back_to_the_bit(tmp_path):
    found = killed(tmp_path, "--kills", "3", "--every", "0")
    assert found["random"]["kills"] == 3


@pytest.mark.slow
def test_fifty_runs_killed_at_random_moments_come_back_to_the_bit(tmp_path):
    found = killed(tmp_path, "--kills", "50", "--every", "0", "--seed", "1")
    assert found["random"]["kills"] == 50
    # they did not all fall into one phase
    assert sum(count > 0 for count in found["random"]["by_phase"].values()) >= 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_runs_killed_at_operations_and_system_calls_come_back_to_the_bit(tmp_path):
    why_not = syscall_kills.unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    found = killed(tmp_path, "--kills", "0", "--every", "9", "--syscalls")
    assert found["operations"]["by_operation"].keys() >= {"open", "write", "half a write"}
    assert len(found["calls"]["by_call"]) > 5


def test_the_page_of_the_campaigns_is_what_the_command_writes(capsys):
    assert campaigns.main(["--check"]) == 0, capsys.readouterr().out
