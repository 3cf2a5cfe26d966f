"""The check for machines with a card runs, line for line, on machines without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_dry_run_passes_every_part(tmp_path):
    subprocess.run(
        [ROOT / "bench/device_check.sh", "--dry", "--out", tmp_path],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    (written,) = tmp_path.glob("*.json")
    found = json.loads(written.read_text())
    assert found["training"]["equal bits"]
    operations = {row["name"] for row in found["operations"] if not row["errors"]}
    assert {"attention forward", "experts forward+backward", "adam_step"} <= operations
    assert all("errors" not in row for row in found["steps"])


def test_a_machine_without_a_card_is_told_of_the_dry_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.device_check", "--out", tmp_path],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "--dry" in done.stderr
