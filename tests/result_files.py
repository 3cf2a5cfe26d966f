"""Result files of benchmarks, made up, and what is looked for in the tables of them."""

import json
from dataclasses import asdict

from bench.report import measured
from bench.shapes import CARD
from fastbrain.config import TransformerConfig

MACHINE = {
    "command": "python -m bench.something --json FILE",
    "date": "2026-01-02",
    "commit": "abc1234",
    "card": "NVIDIA GeForce RTX 3060",
    "driver": "600.1",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "cuda": "None",
}
SHAPE = CARD["dense"]


def training_step(**changes):
    found = {
        "shape": str(SHAPE),
        "parameters": {"fastbrain": 101_674_752, "llama": 101_674_753},
        "tokens_per_s": {"fastbrain bf16": [21_001.2, 21_003.4, 21_002.3], "llama bf16": [9_000.0]},
        "cores": {"fastbrain bf16": [1.99, 1.97, 1.98], "llama bf16": [1.5]},
        "peak_bytes": {"fastbrain bf16": 4321 * 2**20},
        "skipped": {"torch.compile": "there is no compiler"},
        "ratio": {
            "bf16": {
                "wall": 2.3336,
                "cpu": 1.25,
                "hugging_face": 2.5551,
                "ours": "fastbrain bf16",
                "peer": "llama bf16",
            }
        },
        "profile bf16": {
            "fastbrain bf16": {"attention": 25.0, "head": 0.0, "rest": 75.04},
            "llama bf16": {"attention": 50.0, "rest": 50.0},
        },
    }
    return {"kind": "training step", "machine": MACHINE, "results": [found]} | changes


def sweep(**changes):
    config = TransformerConfig(max_seq_len=512)
    result = {
        "device": {"device": "cuda:0", "name": MACHINE["card"], "threads": None},
        "versions": {"torch": "2.13.0", "triton": "3.7.1", "python": "3.11.7"},
        "gpu": {"driver": "600.1"},
        "config": asdict(config),
        "batch": 16,
        "seq": 512,
        "mixed_precision": True,
        "tokens_per_s": {"median": 61_234.5, "lowest": 61_000.0, "highest": 61_400.0},
        "tflops": 0.17341,
        "mfu": 0.6802,
        "memory": {"peak_bytes": 2222 * 2**20, "device_peak_bytes": 3333 * 2**20},
        "prediction": {"tokens_per_s": 70_000.4, "peak_bytes": 1971 * 2**20},
        "warnings": ["something else uses the GPU"],
    }
    rows = [
        {"arguments": "32000 512 8 16 512", "failure": None, "result": result},
        {"arguments": "32000 9999", "failure": "no multiple of 64", "result": None},
    ]
    told = {name: MACHINE[name] for name in ("command", "date", "commit")}
    return {"kind": "sweep", "rows": rows} | told | changes


def operations(**changes):
    attention = {
        "name": "attention forward",
        "ms": {"reference": 4.0, "fused": 0.5, "sdpa": 0.6, "flex": 0.7},
        "peak_bytes": {"fused": 3 * 2**20, "sdpa": 7 * 2**20},
        "skipped": {"liger": "liger-kernel is not installed"},
        "failed": {"xformers": "it crashed"},
        "bytes": 1e8,
        "flops": 5e9,
        "tokens": 0.0,
        "ours": "fused",
        "peer": "sdpa",
        "ratio": 1.2,
    }
    nothing = {"peak_bytes": {}, "skipped": {}, "failed": {}, "bytes": 0.0, "flops": 0.0}
    step = {"name": "training step dense bf16", "ms": {"fastbrain": 400.0}, "tokens": 8192.0}
    read = {"name": "read a batch", "ms": {"memmap": 0.4, "fastbrain": 0.2}, "tokens": 0.0}
    rows = [
        attention,
        nothing | step | {"ours": "fastbrain", "peer": None, "ratio": None},
        nothing | read | {"ours": "fastbrain", "peer": "memmap", "ratio": 2.0, "bytes": 32e3},
        nothing | {"name": "gone", "ms": {}, "ours": None, "peer": None, "ratio": None},
    ]
    return {"kind": "operations", "machine": MACHINE, "toy": False, "rows": rows} | changes


def device_check(**changes):
    case = {"ms": {"fused": 0.5, "reference": 4.0, "sdpa": 0.6}, "flops": 5e9, "bytes": 1e8}
    case |= {"spread": {"fused": 1.01}, "errors": {}, "fastest_peer": "sdpa", "ratio": 1.2}
    ours = {
        "shape": str(SHAPE),
        "tokens_per_s": 22_222.0,
        "peak_bytes": 3210 * 2**20,
        "spread": 1.0134,
        "predicted_tokens_per_s": 25_000.0,
        "predicted_peak_bytes": 3300 * 2**20,
    }
    # faster than ours, so that it shows if it is taken for ours
    peer = {name: ours[name] for name in ("shape", "peak_bytes", "spread")}
    peer["tokens_per_s"] = 55_555.0
    steps = {"dense, fastbrain": ours, "dense, plain PyTorch": peer}
    twins = {"status": "failed", "seconds": 1.5, "budget_s": 135, "left_out": "adam"}
    twins["cases"] = {"swiglu": {"failed": "Traceback\n  there\nValueError: wrong | sum"}}
    passed = {"status": "passed", "seconds": 2.0, "budget_s": 90}
    parts = {
        "twins": twins,
        "graphs": passed | {"error": "the process ended with SIGSEGV\nin thread 7", "cases": {}},
        "operations": passed | {"cases": {"attention": case, "adam": {"skipped": "no room"}}},
        "steps": passed | {"cases": steps},
    }
    return {"kind": "device check", "machine": MACHINE, "parts": parts} | changes


KINDS = {
    "training step": training_step,
    "operations": operations,
    "sweep": sweep,
    "device check": device_check,
}


def put(folder, document, name="found.json"):
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / name).write_text(text)
    return measured.load(folder)


def lines_with(text, *parts):
    return [line for line in text.splitlines() if all(part in line for part in parts)]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def flat(text):
    """The text without its line breaks."""
    return " ".join(text.split())
