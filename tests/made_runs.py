"""Run directories made by hand in milliseconds, and the command lines that look at them."""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from golden import GOLDEN, golden_tensors

from fastbrain import atomic
from fastbrain.formats import huggingface
from fastbrain.formats.safetensors_file import pieces
from fastbrain.tokens import TokenFile
from fastbrain.tokens.prepare import prepare
from fastbrain.tokens.tokenizer import tokenizer_sha256, train_tokenizer
from fastbrain.training import manifest
from fastbrain.training.run_dir import Checkpoint, RunDir

TABLES = {
    "model": {"vocab_size": 300, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16},
    "data": {"train": "corpus.bin", "seq_len": 16},
    "train": {"max_steps": 6, "precision": "f32", "seed": 1},
}
TABLES["model"] |= {"n_layers": 2, "d_ff": 48, "moe_layers": [], "max_seq_len": 32}


def made(path: Path, steps: Iterable[int] = (3, 6)) -> RunDir:
    """A run with checkpoints of these steps, tokens, a tokenizer, metrics and a guard log."""
    run = RunDir.create(path, TABLES)
    (path / "data").mkdir()
    tokenizer = train_tokenizer(["to be or not to be " * 20], 300)
    (path / "data" / "tokenizer.json").write_text(tokenizer.to_str())
    ids = np.random.default_rng(0).integers(0, 280, 3_000)
    TokenFile.write(path / "corpus.bin", ids)
    prepared = prepare(path / "corpus.bin", path / "data" / "train.bin", None)
    known = {
        "path": str(prepared.path),
        "bytes": prepared.path.stat().st_size,
        "tokens": prepared.tokens,
        "max_id": prepared.max_id,
        "sha256": prepared.sha256,
        "blocks_sha256": "",
    }
    record = {"eos": "<|endoftext|>", "pad": "<|pad|>", "files": {"train": known}}
    record["tokenizer_sha256"] = tokenizer_sha256(tokenizer)
    (path / "data" / "corpus.json").write_text(json.dumps(record))
    rows = [{"start": 1, "step": step, "loss": 5 / step} for step in range(1, 7)]
    rows.append({"start": 1, "step": 6, "val_loss": 1.5})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skip = {"start": 1, "kind": "skip", "step": 4, "data_step": 3, "loss": None, "grad_norm": None}
    run.guard_log.write_text(json.dumps(skip) + "\n")
    for step in steps:
        commit(run, step)
    return run


def commit(run: RunDir, step: int) -> Checkpoint:
    """A checkpoint of the golden model."""
    weights = huggingface.stored(golden_tensors())
    moments = {f"{name}.moment{i}": tensor for name, tensor in weights.items() for i in (1, 2)}
    moments["updates"] = torch.tensor(step)
    state = {"format_version": 1, "run_id": run.run_id, "step": step, "updates": step}
    state |= {"optimizer": "Adam", "config": {}, "config_sha256": sha256_of_nothing()}
    texts = {
        "trainer_state.json": state,
        "config.json": huggingface.config_json(GOLDEN),
        "generation_config.json": huggingface.generation_config_json(0, 1),
    }

    def write(directory: Path) -> dict[str, atomic.Written]:
        done = {
            "model.safetensors": atomic.write_new(directory / "model.safetensors", pieces(weights)),
            "optimizer.safetensors": atomic.write_new(
                directory / "optimizer.safetensors", pieces(moments)
            ),
        }
        for name, value in texts.items():
            done[name] = atomic.write_new(directory / name, [json.dumps(value).encode()])
        return done

    return run.commit(step, write)


def relisted(directory: Path, **values: object) -> None:
    """Give a checkpoint a manifest that is right for its files, by someone who knows how."""
    path = directory / manifest.NAME
    found = json.loads(path.read_bytes())
    for name in [] if "files" in values else found["files"]:
        file = directory / name
        if file.is_file():
            found["files"][name] = {
                "bytes": file.stat().st_size,
                "sha256": atomic.sha256_of(file),
            }
    found |= values
    found.pop("self", None)
    found["self"] = manifest._digest(found)
    path.write_text(json.dumps(found))


def sha256_of_nothing() -> str:
    """The digest of an empty table of settings."""
    return "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def command(module: ModuleType, *arguments: object) -> int:
    """Run a verb as the command line does."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(each) for each in arguments]))


def copied(source: Path, target: Path) -> Path:
    """A copy of a directory, which may be damaged."""
    return Path(shutil.copytree(source, target))


def state_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a directory: size, time and bytes, to see that nothing was touched."""
    return {
        str(each.relative_to(path)): (
            each.stat().st_mtime_ns,
            each.stat().st_ino,
            each.read_bytes() if each.is_file() else b"",
        )
        for each in sorted(path.rglob("*"))
    }
