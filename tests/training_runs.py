"""Small training runs for the tests of the training program: how they are begun and compared."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from fastbrain import train
from fastbrain.tokens import TokenFile
from fastbrain.training import chart, metrics

VOCAB = 61
BASE = """
[model]
vocab_size = 61
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 16
d_ff = 48
moe_d_ff = 16
num_experts = 3
experts_per_token = 2
moe_layers = []
max_seq_len = 32

[data]
train = "corpus.bin"
seq_len = 16

[train]
max_steps = 6
global_batch_size = 8
micro_batch_size = 8
learning_rate = 1e-2
max_norm = 0.5

[save]
interval_steps = 3

[eval]
interval = 3
samples = 1
"""


@contextmanager
def entered(folder: Path) -> Iterator[Path]:
    """Be in `folder`, given a `tiny.toml` and a `corpus.bin`; on one thread, as children are."""
    (folder / "tiny.toml").write_text(BASE)
    ids = np.random.default_rng(0).integers(0, VOCAB, 2_000)
    # something to learn: rows of twenty ids that rise
    TokenFile.write(folder / "corpus.bin", np.sort(ids.reshape(-1, 20), axis=1).reshape(-1))
    before, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(folder)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # a second of work that only one test looks at, in a process of its own
        patch.setattr(chart, "draw", lambda *_: "not drawn")
        yield folder
    torch.set_num_threads(threads)
    os.chdir(before)


def run(name: str, *overrides: str) -> int:
    return train.main(["tiny.toml", "--run", name, *overrides])


def checkpoint(name: str, step: int) -> Path:
    return Path(name) / "checkpoints" / f"step-{step:08d}"


def bits(name: str, step: int) -> tuple[bytes, bytes]:
    """Weights, and moments with the counter, of a checkpoint."""
    path = checkpoint(name, step)
    return (path / "model.safetensors").read_bytes(), (path / "optimizer.safetensors").read_bytes()


def numbers(name: str) -> list[tuple]:
    """What the history of a run says apart from clocks and starts."""
    keys = ("step", "loss", "aux_loss", "grad_norm", "learning_rate", "tokens", "val_loss")
    return [
        tuple(row.get(key) for key in keys) for row in metrics.read(Path(name, "metrics.jsonl"))
    ]
