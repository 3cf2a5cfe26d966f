"""Preparing, killed at any moment and by two at once, leaves all or nothing."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest
from texts import TOPICS, dumped, small_tokenizer

from fastbrain.tokens.prepare import prepare


@pytest.fixture
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "corpus.bin"


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from fastbrain.tokens.prepare import load_tokenizer, prepare

source, target, tokenizer = map(Path, sys.argv[1:4])
kills = int(sys.argv[4])

def child():
    pid = os.fork()
    if pid == 0:
        try:
            prepare(source, target, load_tokenizer(tokenizer))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return pid

start = time.monotonic()
assert os.waitpid(child(), 0)[1] == 0
whole = time.monotonic() - start
right = target.read_bytes()
record = target.with_name(target.name + ".json")
draw = random.Random(0)
left = killed = 0
for attempt in range(kills):
    if attempt % 3 == 0:
        target.unlink(missing_ok=True)
    if attempt % 3 == 1:
        record.unlink(missing_ok=True)
    if attempt % 3 == 2:
        target.write_bytes(right[: len(right) // 2])
    pids = [child() for _ in range(1 + attempt % 2)]  # two workers every second time
    time.sleep(draw.uniform(0, 1.2 * whole * len(pids)))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    left += len(list(target.parent.glob(".tmp-*")))
    if target.exists() and attempt % 3 != 2:
        assert target.read_bytes() == right, f"attempt {attempt}: half a file"
    if attempt % 5 == 4:
        assert os.waitpid(child(), 0)[1] == 0
        assert target.read_bytes() == right
        assert not list(target.parent.glob(".tmp-*"))
pids = [child(), child()]
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
assert target.read_bytes() == right
print(killed, left)
"""


def kill_again_and_again(tmp_path, target, tokenizer, kills):
    (tmp_path / "in.jsonl").write_bytes(dumped(*(text[:2000] for text in TOPICS)) * 3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", KILLER, tmp_path / "in.jsonl", target, tmp_path, str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    killed, left = map(int, done.stdout.split())
    assert killed > kills / 4  # or the kills came too late to mean anything
    assert left > 0
    made = prepare(tmp_path / "in.jsonl", target, tokenizer)
    assert made.sha256 == sha256(target.read_bytes()).hexdigest()
    names = {"corpus.bin", "corpus.bin.json", "in.jsonl", "tokenizer.json"}
    assert set(os.listdir(tmp_path)) == names


def test_killed_calls_leave_all_or_nothing_and_the_next_one_finishes(tmp_path, target, tokenizer):
    kill_again_and_again(tmp_path, target, tokenizer, kills=8)


@pytest.mark.slow
def test_two_hundred_kills_leave_all_or_nothing(tmp_path, target, tokenizer):
    kill_again_and_again(tmp_path, target, tokenizer, kills=200)


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(target, tokenizer):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = target.parent
    (folder / f".tmp-corpus.bin-{dead.pid}-abcd").write_text("dead")
    (folder / f".tmp-corpus.bin.json-{dead.pid}-abcd").write_text("dead")
    alive = folder / f".tmp-corpus.bin-{os.getpid()}-abcd"
    other = folder / f".tmp-corpus.binary-{dead.pid}-abcd"
    alive.write_text("alive")
    other.write_text("of another file")
    (folder / "in.txt").write_text("text")
    prepare(folder / "in.txt", target, tokenizer)
    assert sorted(folder.glob(".tmp-*")) == [alive, other]
