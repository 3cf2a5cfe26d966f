"""Whatever a file says, it is refused in a moment, in little memory, and by an error of our own.

Headers of safetensors and .rbw by themselves are in test_safetensors_file.py and
test_rbw_damage.py; here are the other files, and everything that reads a run or a model.
"""

import json
import os
import random
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest
from golden import golden_tensors, written
from hostile_readers import MOST_SECONDS, NEWEST, READERS, looked_at, measured, restored_moments
from made_runs import command, copied, made, relisted

from fastbrain.commands import inspect, verify
from fastbrain.errors import FastBrainError
from fastbrain.formats import opt
from fastbrain.formats.safetensors_file import check_safetensors_header
from fastbrain.training import manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with every file that one may have, and the drop-in files beside."""
    path = made(tmp_path_factory.mktemp("runs") / "whole").path
    written(path / "model.rbw")
    opt.write(path / "model.opt", 7, [(name, each, each) for name, each in golden_tensors()])
    (path / "plain.toml").write_text('[data]\ntrain = "x"\nseq_len = 16\n[train]\nmax_steps = 6\n')
    return path


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return copied(whole, tmp_path / "run")


DEEP = 100_000
JSON: dict[str, bytes | int] = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "null": b"null",
    "number": b"12",
    "list": b"[1, 2, 3]",
    "text": b'"step"',
    "empty object": b"{}",
    "brackets": b"[" * DEEP,
    "braces": b'{"a":' * DEEP,
    "closed brackets": b"[" * DEEP + b"]" * DEEP,
    "a million digits": b'{"step": ' + b"9" * 1_000_000 + b"}",
    "a million decimals": b'{"step": 0.' + b"9" * 1_000_000 + b"}",
    "an exponent": b'{"step": 1e999, "start": 1e999, "format_version": 1e999}',
    "NaN": b'{"step": NaN, "start": NaN, "loss": -Infinity}',
    "not UTF-8": b'{"step": "\xff\xfe"}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "NULs": bytes(4_096),
    "half a pair": b'{"step": "\\ud800", "\\udfff": 1}',
    "two keys": b'{"step": 1, "step": 2}',
    "a million keys": b"{" + b",".join(b'"%d":0' % i for i in range(1_000_000)) + b"}",
    "a million objects": b"[" + b"{}," * 1_000_000 + b"{}]",
    "a long text": b'{"step": "' + b"x" * 5_000_000 + b'"}',
    "an open text": b'{"step": "' + b"\\u0041" * 300_000,
    "200 MB of nothing": 200_000_000,
}
SMALL = ["MANIFEST.json", "trainer_state.json", "config.json"]
TEXTS = [
    *(f"{NEWEST}/{name}" for name in SMALL),
    "data/corpus.json",
    "corpus.bin.json",
    "data/tokenizer.json",
    "metrics.jsonl",
    "guard.jsonl",
]


# what is appended to for weeks, or tells of every file of a folder, may be large
GROWING = ["metrics.jsonl", "guard.jsonl", "corpus.bin.json"]
LARGE = ["a million keys", "a million objects", "a long text", "200 MB of nothing"]
# of these every case is quick enough for every day, of the others some
CHOSEN = [f"{NEWEST}/MANIFEST.json", "data/corpus.json"]
KINDS = ["empty", "brackets", "a million digits", "NaN", "not UTF-8"]
CASES = [
    pytest.param(name, kind, marks=[] if name in CHOSEN or kind in KINDS else [pytest.mark.slow])
    for name in TEXTS
    for kind in JSON
    if name not in GROWING or kind not in LARGE
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_hostile_json(run, name, kind, capsys):
    spoiled(run / name, JSON[kind])
    measured(lambda: looked_at(run, name, capsys), times=2)


def spoiled(path: Path, content: bytes | int) -> None:
    if isinstance(content, int):
        # a file of this size that takes no place on the disk
        path.write_bytes(b"{")
        os.truncate(path, content)
    else:
        path.write_bytes(content + b"\n" if path.suffix == ".jsonl" else content)
    if path.parent.name == Path(NEWEST).name and path.name != manifest.NAME:
        # someone who knows how: the manifest is right
        relisted(path.parent)


VALUES = [
    None, True, -1, 0, 1.5, 2**63, 10**400, 1e300, "", "../x", "/dev/zero", "a\0b", "x" * 300, [],
    [[]], {}, {"a": {}}, "\x1b[2J", "\ud800",
]  # fmt: skip


KEYED = [each for each in TEXTS if "tokenizer" not in each]


@pytest.mark.parametrize("name", KEYED)
def test_a_wrong_value_of_a_key(run, name, capsys):
    replaced(run, name, 10, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYED)
def test_every_wrong_value_of_every_key(run, name, capsys):
    replaced(run, name, None, capsys)


def replaced(run: Path, name: str, most: int | None, capsys) -> None:
    """Put every value at every key of a document, or so many of them by chance."""
    path = run / name
    lines = path.read_bytes().splitlines() if name.endswith("jsonl") else [path.read_bytes()]
    changes = [(place, value) for place in places(json.loads(lines[0])) for value in VALUES]
    if most is not None:
        changes = random.Random(1).sample(changes, min(most, len(changes)))
    for place, value in changes:
        found = json.loads(lines[0])
        put(found, place, value)
        if path.name == manifest.NAME:
            path.write_bytes(lines[0])
            relisted(path.parent, **found)
        else:
            spoiled(path, json.dumps(found).encode() + b"\n" + b"\n".join(lines[1:]))
        looked_at(run, name, capsys)


def places(found: object, before: tuple = ()) -> list[tuple]:
    """Where the first values of a document stand, by the keys that lead there."""
    if isinstance(found, dict):
        here = [(*before, key) for key in list(found)[:30]]
        return here + [
            each for key in list(found)[:3] for each in places(found[key], (*before, key))
        ]
    return []


def put(found: dict, place: tuple, value: object) -> None:
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value


@pytest.mark.parametrize(
    "name", ["../x", "../step-00000003/config.json", "/etc/hostname", "a/b", "..", ".", "", "a\\b"]
)
def test_a_manifest_that_lists_a_path(run, name, capsys):
    path = run / NEWEST / manifest.NAME
    files = json.loads(path.read_bytes())["files"]
    relisted(path.parent, files=files | {name: {"bytes": 1, "sha256": "0" * 64}})
    found = json.loads(path.read_bytes())
    reason = manifest.fault(path.parent, found["run_id"], 6)
    assert reason is not None
    assert reason.endswith((" is not one that fastbrain wrote", " is missing"))
    looked_at(run, f"{NEWEST}/MANIFEST.json", capsys)
    assert command(verify, run) == 1
    assert command(inspect, path) == (0 if "\\" in name else 1)


TOML: dict[str, bytes | int] = {
    "empty": b"",
    "brackets": b"a = " + b"[" * DEEP,
    "tables": b"a = " + b"{a=" * DEEP,
    "dotted": b"a" + b".a" * DEEP + b" = 1",
    "dotted, though short": b"a" + b".a" * 30_000 + b" = 1",
    "digits": b'run_id = "x"\nformat_version = ' + b"9" * 1_000_000,
    "hexadecimal digits": b'run_id = "x"\nformat_version = 0x' + b"f" * 1_000_000,
    "a hexadecimal name": b"format_version = 1\nrun_id = 0x" + b"f" * 10_000,
    "a hexadecimal shape": b'format_version = 1\nrun_id = "x"\n[model]\nd_model = 0x'
    + b"f" * 10_000,
    "layers": b'format_version = 1\nrun_id = "x"\n[model]\nn_layers = 4611686018427387904',
    "not a table": b'format_version = 1\nrun_id = "x"\nmodel = 1\ntrain = []',
    "a date": b"format_version = 1\nrun_id = 1979-05-27T07:32:00Z\ntrain = 1979-05-27",
    "not a number": b"format_version = nan\nrun_id = inf",
    "twice": b"a = 1\na = 2",
    "not UTF-8": b'a = "\xff"',
    "200 MB of nothing": 200_000_000,
}


@pytest.mark.parametrize("kind", TOML)
def test_hostile_toml(run, kind, capsys):
    spoiled(run / "config.toml", TOML[kind])
    measured(lambda: looked_at(run, "config.toml", capsys), times=2)


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


TENSORS: dict[str, tuple[bytes, int]] = {
    # the bytes, and the size that the file is then given
    "2^63": (header(b"{}", 2**63), 0),
    "200 MB": (header(b"{}", 200_000_000), 200_000_010),
    "99 MB of nothing": (header(b"{", 99_000_000), 99_000_008),
    "99 MB of brackets": (header(b'{"a":' + b"[" * DEEP, 99_000_000), 99_000_008),
    "brackets": (header(b'{"a":' + b"[" * DEEP), 0),
    "overlap": (header(json.dumps({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}).encode()), 0),
    "overflow": (header(json.dumps({"a": entry([2**62, 2**62], 0, 8)}).encode() + bytes(8)), 0),
    "many sizes": (header(json.dumps({"a": entry([2**62] * 99_999 + [1], 0, 8)}).encode()), 0),
    "a million": (
        header(b"{" + b",".join(b'"%d":{"data_offsets":[]}' % i for i in range(10**6)) + b"}"),
        0,
    ),
    "a million notes": (
        header(b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(10**6)) + b"}}"),
        0,
    ),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_hostile_headers_of_safetensors(run, kind, capsys):
    name = f"{NEWEST}/model.safetensors"
    content, size = TENSORS[kind]
    (run / name).write_bytes(content)
    if size:
        os.truncate(run / name, size)
    with pytest.raises(FastBrainError):
        check_safetensors_header(run / name)
    measured(lambda: looked_at(run, name, capsys), times=2)


OPT: dict[str, tuple[bytes, int]] = {
    "2^63 tensors": (b"RBOPT001" + struct.pack("<QQ", 2**63, 1), 0),
    "a million tensors": (b"RBOPT001" + struct.pack("<QQ", 10**6, 1), 24 + 16 * 10**6),
    "tensors of nothing": (b"RBOPT001" + struct.pack("<QQ", 27, 1), 24 + 16 * 27),
    "an overflowing shape": (b"RBOPT001" + struct.pack("<QQQQ", 27, 1, 2**32, 2**32), 5_000),
    "a huge shape": (b"RBOPT001" + struct.pack("<QQQQ", 27, 1, 2**63, 1), 5_000),
    "a shape of a sparse file": (b"RBOPT001" + struct.pack("<QQQQ", 1, 1, 10**6, 10**5), 10**12),
    "a counter past 2^63": (b"RBOPT001" + struct.pack("<QQ", 27, 2**63), 5_000),
}


@pytest.mark.parametrize("kind", OPT)
def test_hostile_optimizer_states(run, kind, capsys):
    content, size = OPT[kind]
    (run / "model.opt").write_bytes(content)
    if size:
        os.truncate(run / "model.opt", size)
    with pytest.raises(FastBrainError):
        restored_moments(run / "model.opt")
    measured(lambda: looked_at(run, "model.opt", capsys), times=2)


@pytest.mark.parametrize("layers", [2**62, 10**8])
def test_a_configuration_of_many_layers(run, layers, capsys):
    path = run / NEWEST / "config.json"
    found = json.loads(path.read_bytes())
    found["fastbrain"]["n_layers"] = layers
    spoiled(path, json.dumps(found).encode())
    measured(lambda: looked_at(run, f"{NEWEST}/config.json", capsys), times=2)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A file as something, or someone, may have left it."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(found) + 1) if draw.random() < 0.5 else draw.randrange(200)
        at = min(at, max(len(found) - 1, 0))
        piece = draw.choice(
            [
                bytes([draw.randrange(256)]),
                struct.pack("<Q", draw.choice([0, 1, 2**31, 2**62, 2**63, 2**64 - 1])),
                draw.choice([b"{", b"}", b"[", b"]", b'"', b",", b":", b"-", b"1e999", b"null"]),
                draw.choice([b"[" * 3_000, b"9" * 5_000, b"NaN", b"\\ud800", b"\xff", b"../x"]),
                bytes(found[at : at + draw.randrange(1, 60)]),
            ]
        )
        match draw.randrange(5):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                found[at : at + len(piece)] = piece
            case 2:
                found[at:at] = piece
            case 3:
                del found[at : at + draw.randrange(1, 60)]
            case 4:
                del found[at:]
        if not found:
            break
    return bytes(found)


def fuzzed(run: Path, seed: int, capsys) -> None:
    draw = random.Random(seed)
    name = draw.choice(list(READERS))
    path = run / name
    listed = run / NEWEST / manifest.NAME
    before = {each: each.read_bytes() for each in (path, listed)}
    try:
        path.write_bytes(damaged(before[path], draw))
        if path.parent.name == Path(NEWEST).name and draw.random() < 0.5:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                relisted(path.parent)
        started = time.process_time()
        looked_at(run, name, capsys)
        assert time.process_time() - started < MOST_SECONDS
    except BaseException as error:
        error.add_note(f"fuzzed {name} with seed {seed}")
        raise
    finally:
        for each, content in before.items():
            each.write_bytes(content)


def test_random_damage(run, capsys):
    for seed in range(120):
        fuzzed(run, seed, capsys)


@pytest.mark.slow
def test_ten_minutes_of_random_damage(run, capsys):
    first = int(os.environ.get("FASTBRAIN_FUZZ_SEED", time.time_ns() % 10**9))
    end, seed = time.monotonic() + 600, first
    while time.monotonic() < end:
        fuzzed(run, seed, capsys)
        seed += 1
