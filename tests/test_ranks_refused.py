"""What speaks against a run of several ranks ends all of them alike, and is said once."""

import json
import os
import shutil
from pathlib import Path

import pytest
from fault_jobs import words
from ranks import Rank, needs_fork, together
from training_runs import checkpoint, entered

from fastbrain import cli
from fastbrain.training.lock import Lock

pytestmark = needs_fork


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("refused")) as folder:
        ended(together("fault_jobs:program", words("whole", "train.max_steps=2")))
        yield folder


def ended(found: list[Rank], code: int = 0) -> list[Rank]:
    """All ranks, each of which must have ended with this code, without a traceback."""
    assert [each.code for each in found] == [code] * len(found), found
    assert not any("Traceback" in each.err for each in found), found
    return found


def refused(command: list[str], *said: str, code: int = 2, ranks: int = 2) -> None:
    """A command that all ranks must refuse alike, of which one says why."""
    found = ended(together("fault_jobs:program", command, ranks=ranks), code)
    for part in said:
        assert part in found[0].err
    assert found[0].err.startswith("fastbrain: ")
    assert [each.err for each in found[1:]] == [""] * (ranks - 1)
    assert [each.out for each in found[1:]] == [""] * (ranks - 1)


def without(command: list[str], key: str) -> list[str]:
    return [each for each in command if not each.startswith(f"{key}=")]


def test_rows_that_the_ranks_cannot_share_are_refused_with_the_values_nearby():
    refused(
        words("uneven", "train.global_batch_size=10"),
        "a multiple of processes times train.micro_batch_size, 2 x 2 = 4, got 10",
        "nearest: 8 and 12",
        "or train.micro_batch_size=1",
    )
    assert not Path("uneven/config.toml").exists()


@pytest.mark.slow
def test_fewer_rows_than_ranks_are_refused():
    command = without(words("few", "train.global_batch_size=3"), "train.micro_batch_size")
    refused(
        [*command, 'train.micro_batch_size="auto"'],
        "a multiple of the number of processes, which is 4, got 3; nearest: 4",
        ranks=4,
    )


def test_a_locked_run_is_refused_by_all_ranks(tmp_path):
    lock = Lock.acquire(Path("whole"))
    try:
        refused(["resume", "whole"], f"is being trained by process {os.getpid()} on", code=4)
    finally:
        lock.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("train.parallel=both", 'train.parallel must be'),
        ("train.max_stepss=3", "train.max_stepss"),
        ("data.train=nowhere.bin", "nowhere.bin"),
        ("model.d_model=-3", "d_model"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_wrong_is_refused_by_all_ranks(more, said):
    refused(words("bad", more), said)


@pytest.mark.slow
def test_a_run_that_is_there_is_refused_by_all_ranks():
    refused(words("whole"), "there is a run at whole already")
    refused(["resume", "nowhere"], "there is no run at nowhere")


@pytest.mark.slow
def test_a_run_without_an_intact_checkpoint_is_refused_by_all_ranks():
    shutil.copytree("whole", "damaged")
    os.truncate(checkpoint("damaged", 2) / "model.safetensors", 9)
    refused(["resume", "damaged"], "damaged has no intact checkpoint", code=3)


@pytest.mark.slow
def test_a_corpus_that_changed_is_refused_by_all_ranks():
    shutil.copy("corpus.bin", "copy.bin")
    command = words("changed", "train.max_steps=2", "data.train=copy.bin")
    ended(together("fault_jobs:program", command))
    os.truncate("copy.bin", 4_000)
    found = ended(together("fault_jobs:program", ["resume", "changed"]), 2)
    assert "copy.bin" in found[0].err


def test_a_rank_that_does_not_see_the_run_says_so():
    first, other = ended(together("fault_jobs:blind", ["resume", "whole"], 1, "whole"), 2)
    assert "does not see the run at" in other.err
    assert "must lie where all machines see it under one name" in other.err
    assert other.err.startswith("fastbrain: rank 1: ")
    assert "another process of this run has ended" in first.err


@pytest.mark.slow
def test_a_rank_that_does_not_see_a_new_run_ends_all():
    first, other = ended(together("fault_jobs:blind", words("unseen"), 1, "unseen"), 2)
    assert "does not see the run at" in other.err
    assert "another process of this run has ended" in first.err
    assert not Path("unseen/config.toml").exists()
    ended(together("fault_jobs:program", words("unseen", "train.max_steps=1")))


def test_a_slip_in_the_command_line_is_said_once():
    found = ended(together("fault_jobs:program", ["train", "tiny.toml", "--strange"]), 2)
    assert "unrecognized arguments: --strange" in found[0].err
    assert (found[1].out, found[1].err) == ("", "")


@pytest.mark.slow
def test_help_is_printed_once():
    found = ended(together("fault_jobs:program", ["train", "--help"]))
    assert "usage: " in found[0].out
    assert (found[1].out, found[1].err) == ("", "")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_refused(monkeypatch, capsys, name):
    for each in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(each, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(name)
    assert cli.main(words("half")) == 2
    assert f"WORLD_SIZE=2 and has no {name}: start the processes by torchrun" in (
        capsys.readouterr().err
    )
    assert not Path("half").exists()


@pytest.mark.parametrize(
    ("rank", "act"),
    [
        (1, "out of memory"),
        pytest.param(0, "out of memory", marks=pytest.mark.slow),
        pytest.param(1, "mistake", marks=pytest.mark.slow),
        pytest.param(0, "mistake", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_all(rank, act):
    name = f"error-{rank}-{act.replace(' ', '-')}"
    found = together("fault_jobs:program", words(name), [(rank, "forward", 5, act)])
    assert [each.code for each in found] == [1, 1]
    own, other = found[rank].err, found[1 - rank].err
    prefix = "fastbrain: rank 1: " if rank else "fastbrain: "
    assert all(line.startswith(prefix) for line in own.splitlines())
    assert ("out of memory" if act == "out of memory" else "a mistake of ours") in own
    assert ("Traceback" in own) == (act == "mistake")
    assert "another process of this run has ended" in other
    assert "Traceback" not in other
    assert cli.main(["verify", name]) == 0


def test_one_object_is_printed_by_one_rank():
    command = [*words("printed", "train.max_steps=2"), "--json"]
    first, other = ended(together("fault_jobs:program", command))
    assert json.loads(first.out)["step"] == 2
    assert (other.out, other.err) == ("", "")
