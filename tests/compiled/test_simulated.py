"""The planner's shares of our kernels are those of the machine code that would be made today."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import pytest

from fastbrain.kernels import report, simulated
from fastbrain.kernels.simulated import Row, Task

# a run of the model varies by so much with the order of launches
SPREAD = 0.03


def stored() -> dict[Row, dict[int, float]]:
    text = (resources.files("fastbrain") / "plan" / "simulated.json").read_text()
    content = json.loads(text)
    return {
        Row(row["name"], row["dtype"], row["head_dim"], tuple(row["tile"])): dict(
            zip(row["size"], row["share"], strict=True)
        )
        for row in content["attention"] + content["products"]
    }


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(Task("bf16", 64, 1024), id="attention"),
        pytest.param(Task("bf16", None, 2), id="experts", marks=pytest.mark.slow),
    ],
)
def test_the_file_holds_todays_shares(task, tmp_path):
    """Compiling takes a process without TRITON_INTERPRET."""
    program = (
        "import json, triton\n"
        "from fastbrain.kernels.simulated import Task, simulate\n"
        f"triton.knobs.cache.dir = {str(tmp_path)!r}\n"
        f"print(json.dumps([[*key, share] for key, share in simulate({task!r}).items()]))"
    )
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found
    table = stored()
    for (name, dtype, head_dim, tile), size, share in found:
        row = Row(name, dtype, head_dim, tuple(tile))
        assert table[row][size] == pytest.approx(share, rel=SPREAD)


def test_the_file_covers_every_task():
    sizes = {size for row, found in stored().items() if row.head_dim == 64 for size in found}
    assert sizes == set(simulated.LENGTHS)
    widths = {row.head_dim for row in stored()} - {0}
    assert widths == {task.head_dim for task in simulated.tasks()} - {None}
    assert {row.dtype for row in stored()} == {"bf16", "fp32"}


def test_what_is_written_is_what_is_simulated(tmp_path, monkeypatch):
    row = Row("forward", "bf16", 64)
    monkeypatch.setattr(simulated, "tasks", lambda: [Task("bf16", 64, 64)])
    monkeypatch.setattr(simulated, "simulate", lambda task: {(row, task.size): 0.5})
    # the pool's own processes would not know the patches
    monkeypatch.setattr(report, "ProcessPoolExecutor", lambda *args: ThreadPoolExecutor(1))
    path = tmp_path / "shares.json"
    report.write_simulated(path, 1, "a command")
    content = json.loads(path.read_text())
    assert content["command"] == "a command"
    assert content["attention"] == [{**row._asdict(), "tile": [], "size": [64], "share": [0.5]}]
