"""A rank that dies takes the others down within seconds, and the run comes back to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_jobs import waited_s, words
from ranks import needs_fork, together
from training_runs import entered

from bench.campaigns import runs
from fastbrain import cli

pytestmark = needs_fork

# from the death of a rank to the end of the last other one
MOST_S = 40

WHOLE: dict[tuple[str, int], runs.End] = {}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("die")) as folder:
        yield folder
    WHOLE.clear()


def whole(parallel: str, ranks: int) -> runs.End:
    """What a run holds that nothing befell."""
    if (parallel, ranks) not in WHOLE:
        name = f"whole-{parallel}-{ranks}"
        found = together("fault_jobs:program", words(name, parallel=parallel), ranks=ranks)
        assert [each.code for each in found] == [0] * ranks, found
        WHOLE[parallel, ranks] = runs.end(Path(name))
    return WHOLE[parallel, ranks]


def killed(
    parallel: str,
    victim: int,
    place: str,
    calls: int,
    ranks: int = 2,
    code: int = 1,
    act: str = "KILL",
) -> float:
    """Begin a run, have one rank die, look at what is left, and go on to the end.

    Returns the seconds from the death to the end of the last other rank.
    """
    expected = whole(parallel, ranks)
    name = f"{parallel}-{ranks}-{victim}-{place}-{calls}-{act}"
    begin = words(name, parallel=parallel)
    faults = [(victim, place, calls, act)]
    patience_s = 5.0 if act == "STOP" else 20.0
    found = together("fault_jobs:program", begin, faults, patience_s, ranks=ranks)
    others = [rank for rank in range(ranks) if rank != victim]
    assert found[victim].code == -signal.SIGKILL, found
    for rank in others:
        assert found[rank].code == code, found
        lines = found[rank].err.splitlines()
        if rank and code == 2:
            # of what was refused the first rank alone speaks
            assert lines == []
            continue
        assert "another process of this run has ended" in lines[0]
        # the first rank alone says how to go on
        assert len(lines) <= (2 if rank == 0 and code == 1 else 1), lines
        assert all(line.startswith("fastbrain: ") for line in lines), lines
    waited = max(waited_s(victim, rank) for rank in others)
    assert 0 < waited < MOST_S
    if any(Path(name).glob("checkpoints/step-????????")):
        assert cli.main(["verify", name]) == 0
    again = ["resume", name] if Path(name, "config.toml").is_file() else begin
    after = together("fault_jobs:program", again, ranks=ranks)
    assert [each.code for each in after] == [0] * ranks, after
    runs.require_same(Path(name), expected)
    return waited


@pytest.mark.parametrize(
    ("parallel", "victim", "place", "calls"),
    [
        ("ddp", 1, "bucket", 6),  # in the backward of step 5, before gradients are summed
        ("fsdp", 0, "operation", 17),  # half-way through the first save, while the others train
        # while the first rank gathers what it will save
        pytest.param("fsdp", 1, "gather", 9, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_in_a_step_or_a_save_ends_the_others_and_nothing_is_lost(
    parallel, victim, place, calls
):
    killed(parallel, victim, place, calls)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_given_up():
    assert killed("ddp", 1, "exchange", 4, act="STOP") > 1


IN_A_STEP = [
    (parallel, victim, place, calls)
    for parallel, last in (("ddp", ("bucket", 5)), ("fsdp", ("block", 12)))
    for victim in (0, 1)
    for place, calls in (("forward", 5), ("block", 15), ("exchange", 3), ("update", 2), last)
]
IN_A_SAVE = [
    *[("ddp", 0, "operation", calls) for calls in range(0, 35, 5)],
    *[("fsdp", 0, "operation", calls) for calls in range(0, 35, 5)],
    *[("fsdp", victim, "gather", calls) for victim in (0, 1) for calls in (3, 70)],
    *[("ddp", victim, "take", 1) for victim in (0, 1)],
]  # fmt: skip
ELSEWHERE = [
    (parallel, victim, place, calls)
    for parallel in ("ddp", "fsdp")
    for victim, place, calls in (
        (0, "evaluate", 1), (1, "evaluate", 1), (0, "gathered", 0), (1, "gathered", 0),
        (0, "samples", 1), (0, "conclude", 0),
    )
]  # fmt: skip
BEFORE = [(0, "data"), (0, "corpus"), (1, "corpus"), (0, "distribute"), (1, "distribute")]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "victim", "place", "calls"), IN_A_STEP)
def test_twenty_kills_in_steps_end_clean_and_resume(parallel, victim, place, calls):
    assert len(IN_A_STEP) == 20
    killed(parallel, victim, place, calls)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "victim", "place", "calls"), IN_A_SAVE)
def test_twenty_kills_in_saves_end_clean_and_resume(parallel, victim, place, calls):
    assert len(IN_A_SAVE) == 20
    killed(parallel, victim, place, calls)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "victim", "place", "calls"), ELSEWHERE)
def test_kills_elsewhere_end_clean_and_resume(parallel, victim, place, calls):
    killed(parallel, victim, place, calls)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("victim", "place"), BEFORE)
def test_kills_before_the_first_step_are_refusals(parallel, victim, place):
    killed(parallel, victim, place, 0, code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "victim", "place", "calls"),
    [
        ("ddp", 3, "bucket", 5),
        ("ddp", 0, "operation", 12),
        ("ddp", 2, "evaluate", 0),
        ("fsdp", 2, "block", 9),
        ("fsdp", 1, "gather", 40),
        ("fsdp", 0, "operation", 20),
    ],
)
def test_one_of_four_that_dies_takes_three_down(parallel, victim, place, calls):
    killed(parallel, victim, place, calls, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, "KILL"), (1, "KILL"), (1, "STOP")])
def test_real_processes_end_by_themselves(victim, number):
    """Beside a rank that is gone, and one that hangs: an interpreter's exit waits for neither."""
    name = f"real-{victim}-{number}"
    program = (
        "import json, sys; from fault_jobs import program; "
        "words, faults = json.loads(sys.argv[1]); sys.exit(program(words, faults, 3.0))"
    )
    tests = Path(__file__).parent
    port = str(20_000 + os.getpid() % 20_000)
    job = json.dumps([words(name), [(victim, "exchange", 4, number)]])
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, job],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{tests}:{tests.parent}", "LOCAL_WORLD_SIZE": "2",
            },
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        _, said = children[1 - victim].communicate(timeout=90)
        ended = time.monotonic()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert children[1 - victim].returncode == 1, said
    assert ended - float(Path(f"hit-{victim}").read_text()) < MOST_S
    assert b"another process of this run" in said
    assert b"Traceback" not in said
