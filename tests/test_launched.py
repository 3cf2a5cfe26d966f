"""A process knows from torchrun's environment whether it is alone, and refuses half of one."""

import subprocess
import sys

import pytest

from fastbrain import InvalidConfig
from fastbrain.parallel.launch import Launch

WHOLE = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {**WHOLE, "WORLD_SIZE": "1"}])
def test_one_process_is_alone_whatever_else_is_set(environment):
    found = Launch.find(environment)
    assert found == Launch()
    assert found.alone
    assert found.leads


def test_what_torchrun_sets_is_read():
    found = Launch.find(WHOLE)
    assert (found.rank, found.world_size) == (3, 4)
    assert (found.local_rank, found.local_world_size) == (1, 2)
    assert found.restarts_left == 0
    assert not found.alone
    assert not found.leads
    assert Launch.find({**WHOLE, "RANK": "0"}).leads


def test_restarts_are_counted_down():
    counts = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    found = Launch.find({**WHOLE, **counts})
    assert found.restarts_left == 2


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_refused_with_what_it_lacks(name):
    half = {key: value for key, value in WHOLE.items() if key != name}
    with pytest.raises(InvalidConfig) as refusal:
        Launch.find(half)
    said = str(refusal.value)
    assert said.startswith(f"the environment says WORLD_SIZE=4 and has no {name}: start")
    assert "torchrun --nproc-per-node 4 -m fastbrain.train" in said
    assert said.endswith("or unset WORLD_SIZE to train in one")


def test_everything_that_is_missing_is_named():
    with pytest.raises(InvalidConfig, match="has no RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT:"):
        Launch.find({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("WORLD_SIZE", "0", 1),
        ("WORLD_SIZE", "two", 1),
        ("WORLD_SIZE", "", 1),
        ("RANK", "-1", 0),
        ("RANK", "1.5", 0),
        ("LOCAL_RANK", " ", 0),
        ("LOCAL_WORLD_SIZE", "0", 1),
        ("TORCHELASTIC_RESTART_COUNT", "once", 0),
        ("TORCHELASTIC_MAX_RESTARTS", "x", 0),
    ],
)
def test_what_is_not_a_number_that_fits_is_named(name, value, least):
    with pytest.raises(InvalidConfig) as refusal:
        Launch.find({**WHOLE, name: value})
    assert str(refusal.value) == (
        f"the environment variable {name} must be a whole number of at least {least}, got "
        f"{value!r}; torchrun sets it"
    )


def test_a_rank_beyond_the_last_is_refused():
    with pytest.raises(InvalidConfig, match="RANK must be below WORLD_SIZE, which is 4, got 4"):
        Launch.find({**WHOLE, "RANK": "4"})


def test_it_is_known_without_torch():
    code = "import fastbrain.parallel.launch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
