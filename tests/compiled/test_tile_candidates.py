"""The script behind the table of tiles that lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import tile_candidates
from fastbrain.kernels import tiles

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("kernel", "width"), tile_candidates.ATTENTION)
def test_the_first_attention_candidate_is_the_tile_that_ships(kernel, width):
    shipped = getattr(tiles, kernel.replace(".", "_"))("sm_86", width, 2)
    assert tile_candidates.ATTENTION[kernel, width][0] == tuple(shipped.values())


@pytest.mark.parametrize(
    ("kernel", "shipped"),
    [
        ("experts.hidden", tiles.expert_hidden("sm_86", 2)),
        ("experts.hidden_grad", tiles.expert_hidden_grad("sm_86", 2)),
        ("grouped_gemm.rows", tiles.group_rows("sm_86", 2)),
        ("grouped_gemm.weights", tiles.group_weights("sm_86", 2, gathers=True)),
    ],
)
def test_the_first_expert_candidate_is_the_tile_that_ships(kernel, shipped):
    assert tile_candidates.EXPERTS[kernel][0] == tuple(shipped.values())


@pytest.mark.slow
def test_every_candidate_is_judged():
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.tile_candidates"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == len(tile_candidates.ATTENTION) + len(tile_candidates.EXPERTS)
    assert not [row for row in rows if "Error" in row]
    tiles_judged = re.findall(r" w\d s\d \d+\.\d{3}", done.stdout)
    assert len(tiles_judged) == len(list(tile_candidates.candidates()))
