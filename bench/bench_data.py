"""Reading batches of tokens, and making tokens of text, against what one would write without us."""

import json
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Tokenizer

from bench.timing import row
from fastbrain import TokenFile
from fastbrain.tokens.tokenizer import train_tokenizer

SEQUENCES, SEQ_LEN = 8, 1024
TOKENS = 4_000_000
CHARACTERS = 1_000_000
END = 0  # the id after each document


@pytest.mark.parametrize(
    ("case", "contender"), [row("read a batch", name) for name in ("fastbrain", "memmap")]
)
def bench_batch(benchmark: BenchmarkFixture, tmp_path: Path, case: str, contender: str) -> None:
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(32_000, size=TOKENS, dtype=np.uint32).tofile(path)
    with TokenFile.open(path, seed=0) as tokens:
        steps = iter(range(1 << 62))
        mapped = np.memmap(path, dtype="<u4", mode="r")

        def ours() -> torch.Tensor:
            return tokens.batch(next(steps), SEQUENCES, SEQ_LEN).ids

        def theirs() -> torch.Tensor:
            starts = torch.randint(TOKENS - SEQ_LEN, (SEQUENCES,)).tolist()
            windows = [mapped[s : s + SEQ_LEN].astype(np.int64) for s in starts]
            return torch.stack([torch.from_numpy(window) for window in windows])

        benchmark.extra_info.update(tokens=SEQUENCES * SEQ_LEN, bytes=4 * SEQUENCES * SEQ_LEN)
        ids = benchmark(ours if contender == "fastbrain" else theirs)
    assert ids.shape == (SEQUENCES, SEQ_LEN)


@pytest.mark.parametrize(
    ("case", "contender"),
    [row("text to ids", name) for name in ("fastbrain", "encode_batch", "encode_batch_fast")],
)
def bench_write_jsonl(
    benchmark: BenchmarkFixture, tmp_path: Path, case: str, contender: str
) -> None:
    source, target = tmp_path / "text.jsonl", tmp_path / "ids.bin"
    lines = (json.dumps({"text": document}) for document in _documents())
    source.write_text("\n".join(lines) + "\n", "utf-8")
    ways: dict[str, Callable[[], Any]] = {
        "fastbrain": lambda: TokenFile.write_jsonl(
            target, source, "text", END, _tokenizer(), progress=False
        ),
        "encode_batch": lambda: _encode(source, target, _tokenizer().encode_batch),
        "encode_batch_fast": lambda: _encode(source, target, _tokenizer().encode_batch_fast),
    }
    benchmark.extra_info["bytes"] = source.stat().st_size
    benchmark(ways[contender])
    assert np.fromfile(target, "<u4").tolist() == _expected()


def _encode(source: Path, target: Path, encode: Callable[..., Any]) -> None:
    """The whole job by the peer: parse, encode all documents at once, write 32-bit ids."""
    with source.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    encodings = encode(texts, add_special_tokens=False)
    ids = [np.array([*encoding.ids, END], np.uint32) for encoding in encodings]
    np.concatenate(ids).tofile(target)


@cache
def _documents() -> list[str]:
    """The standard library's sources, the first million characters."""
    found: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= CHARACTERS:
            break
        found.append(path.read_text("utf-8"))
        size += len(found[-1])
    return found


@cache
def _tokenizer() -> Tokenizer:
    return train_tokenizer(_documents()[:5], 1000)


@cache
def _expected() -> list[int]:
    return [i for text in _documents() for i in [*_tokenizer().encode(text).ids, END]]
