"""Whoever asks a run of several ranks to stop or to save, and however: all do it at one step."""

import re
import shutil
from pathlib import Path

import pytest
from fault_jobs import words
from ranks import Rank, needs_fork, together
from training_runs import entered

from bench.campaigns import runs
from fastbrain import cli
from fastbrain.training import guard_log, metrics

pytestmark = needs_fork

WHOLE: dict[str, runs.End] = {}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("stop")) as folder:
        yield folder
    WHOLE.clear()


def whole(parallel: str) -> runs.End:
    """What a run holds that nobody stopped."""
    if parallel not in WHOLE:
        ended(together("fault_jobs:program", words(f"whole-{parallel}", parallel=parallel)))
        WHOLE[parallel] = runs.end(Path(f"whole-{parallel}"))
    return WHOLE[parallel]


def ended(found: list[Rank], code: int = 0) -> list[Rank]:
    """All ranks, each of which must have ended with this code."""
    assert [each.code for each in found] == [code] * len(found), found
    return found


def steps(name: str) -> list[int]:
    """The steps that there are checkpoints of."""
    return sorted(int(path.name[5:]) for path in Path(name, "checkpoints").glob("step-????????"))


def losses(name: str) -> list[float]:
    """Of every step of the one history that a run tells."""
    rows = metrics.read(Path(name, "metrics.jsonl"))
    return [row["loss"] for row in rows if "loss" in row]


def goes_on(name: str, parallel: str) -> None:
    """Resume, and be what the run would be that nobody stopped."""
    ended(together("fault_jobs:program", ["resume", name]))
    runs.require_same(Path(name), whole(parallel))


def stopped(
    faults: list[tuple[int, str, int, str]],
    name: str,
    parallel: str = "ddp",
    code: int = 75,
    environment: dict[str, str] | None = None,
) -> list[Rank]:
    """A run that is stopped by a fault after step 2, looked at and taken to its end."""
    options = {"environment": environment or {}}
    begin = words(name, "save.interval_steps=9", "eval.interval=3", parallel=parallel)
    found = ended(together("fault_jobs:program", begin, faults, **options), code)
    assert found[1].out == ""
    (step,) = [each for each in steps(name) if each != 3] or [3]
    assert step in (3, 4)
    history = metrics.read(Path(name, "metrics.jsonl"))
    assert max(row["step"] for row in history) == step
    assert f"stopped: {step} of 6 steps" in found[0].out
    goes_on(name, parallel)
    return found


def test_a_signal_to_one_rank_alone_stops_all_at_one_step():
    found = stopped([(1, "step", 2, "TERM")], "one")
    assert found[1].err == ""


def test_a_stop_under_torchrun_with_restarts_left_is_no_failure():
    name = "stop-file"
    faults = [(0, "step", 2, f"{name}/STOP")]
    stopped(faults, name, "ddp", 0, {"TORCHELASTIC_MAX_RESTARTS": "2"})
    assert not Path(name, "STOP").exists()


SIGNALS = ["TERM", "INT", "USR1", "HUP"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_every_signal_to_any_ranks_stops_all_at_one_step(who, number, parallel):
    name = f"{number}-{who}-{parallel}"
    found = stopped([(rank, "step", 2, number) for rank in who], name, parallel)
    if 0 in who:
        assert f"SIG{number}: stopping after this step" in found[0].out


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "exchange", "update", "evaluate", "write"])
def test_a_signal_at_any_moment_stops_all_at_one_step(place):
    """Also in different steps on different ranks."""
    for rank, calls in ((0, 1), (1, 2)):
        name = f"at-{place}-{rank}"
        faults = [(rank, place, calls, "TERM"), (1 - rank, "step", 4, "USR1")]
        found = together("fault_jobs:program", words(name), faults)
        assert found[0].code == found[1].code
        assert found[0].code in (0, 75)
        goes_on(name, "ddp")


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_takes_the_others_along():
    faults = [(0, "step", 4, "TERM"), (0, "exchange", 4, "INT")]
    first, other = together("fault_jobs:program", words("left"), faults)
    assert (first.code, other.code) == (130, 1)
    assert "interrupted; the last checkpoint is left/checkpoints/step-00000004" in first.err
    assert "another process of this run has ended" in other.err
    goes_on("left", "ddp")


@pytest.mark.slow
def test_a_save_file_saves_and_all_go_on():
    for parallel in ("ddp", "fsdp"):
        name = f"saved-{parallel}"
        begin = words(name, "save.interval_steps=9", "eval.interval=6", parallel=parallel)
        ended(together("fault_jobs:program", begin, [(0, "step", 1, f"{name}/SAVE")]))
        assert steps(name) in ([2, 6], [3, 6])
        assert not Path(name, "SAVE").exists()


def test_the_clock_of_the_first_rank_alone_decides():
    """That of the other one runs a million times as fast: it would save and stop at once."""
    timed = ("save.interval_min=5e-4", "train.max_time=10m", "save.keep=9")
    begin = [each for each in words("clocks", *timed) if "interval_steps" not in each]
    ended(together("fault_jobs:hurried", begin, 1, 1e6))
    assert steps("clocks")[-1] == 6


@pytest.mark.slow
def test_the_time_is_up_when_it_is_on_the_first_rank():
    begin = words("hurried", "train.max_time=10m", "eval.interval=9")
    ended(together("fault_jobs:hurried", begin, 0, 1e9), 75)
    assert steps("hurried") == [2]
    goes_on_anew("hurried")


def goes_on_anew(name: str) -> None:
    """Resume under clocks that are right, and have the bits of the run that nobody stopped."""
    ended(together("fault_jobs:program", ["resume", name]))
    assert runs.end(Path(name))[:2] == whole("ddp")[:2]


@pytest.mark.slow
def test_four_ranks_stop_together():
    name = "four"
    found = together("fault_jobs:program", words(name), [(3, "step", 1, "TERM")], ranks=4)
    ended(found, 75)
    ended(together("fault_jobs:program", ["resume", name], ranks=4))
    ended(together("fault_jobs:program", words("four-whole"), ranks=4))
    runs.require_same(Path(name), runs.end(Path("four-whole")))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_not_a_number_on_one_rank_stops_all_before_the_next_update(rank):
    begin = words(f"bad-{rank}", "guard.policy=stop", "eval.interval=9")
    found = ended(together("fault_jobs:poisoned", begin, rank, [5]), 1)
    assert found[0].err.startswith("fastbrain: step 3: its loss or gradient is not finite")
    # all of them find it, and one says so
    assert found[1].err == ""
    assert steps(f"bad-{rank}") == [2]
    goes_on_anew(f"bad-{rank}")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_go_back_together(rank, parallel):
    name = f"back-{rank}-{parallel}"
    options = ("guard.policy=rollback", "eval.interval=99", "eval.samples=0", "save.keep=1")
    begin = words(name, *options, "train.max_steps=18", "save.interval_steps=1", parallel=parallel)
    # two micro-batches a step on each rank: steps 11, 12 and 13
    found = ended(together("fault_jobs:poisoned", begin, rank, [20, 22, 25]))
    assert "rolled back to step 1; the rows of steps 3 to 13 are passed over" in found[0].out
    assert guard_log.rollbacks(Path(name, "guard.jsonl")) == [(2, 11)]
    rows = metrics.read(Path(name, "metrics.jsonl"))
    assert [row["start"] for row in rows if "loss" in row] == [1, *[2] * 17]
    # from the beginning, the decision known, one comes to the same bits, and one process alone to
    # the same rows
    for again in (f"{name}-again", f"{name}-alone"):
        shutil.copytree(name, again)
        shutil.rmtree(f"{again}/checkpoints")
        Path(f"{again}/checkpoints").mkdir()
    ended(together("fault_jobs:program", ["resume", f"{name}-again"]))
    assert runs.end(Path(name))[:2] == runs.end(Path(f"{name}-again"))[:2]
    assert cli.main(["resume", f"{name}-alone"]) == 0
    assert losses(f"{name}-alone") == pytest.approx(losses(name), rel=1e-5)


def test_a_disk_that_refuses_three_saves_ends_all_ranks():
    begin = words("full", "save.interval_steps=1", "train.max_steps=20", "eval.interval=99")
    first, other = ended(together("fault_jobs:full_disk", begin, 2), 1)
    assert "3 saves in a row have failed; the last one: cannot write" in first.err
    assert "the last checkpoint is full/checkpoints/step-00000002" in first.err
    assert re.fullmatch("fastbrain: rank 1: another process of this run has ended.*\n", other.err)
    assert steps("full") == [1, 2]
    assert cli.main(["verify", "full"]) == 0


@pytest.mark.slow
def test_a_last_save_that_fails_is_a_failure_of_all_ranks():
    for parallel in ("ddp", "fsdp"):
        name = f"last-{parallel}"
        begin = words(name, parallel=parallel)
        first, other = ended(together("fault_jobs:full_disk", begin, 5), 1)
        assert "cannot write" in first.err
        assert f"the last checkpoint is {name}/checkpoints/step-00000004" in first.err
        assert "another process of this run has ended" in other.err
        goes_on(name, parallel)
