"""Checks and times fastbrain on this machine's GPU, part by part.

A part that fails is reported, and the rest goes on. With --dry every line runs at a toy size on the
CPU, under Triton's interpreter, and no time is quoted.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

if "--dry" in sys.argv:
    # Triton reads it when a kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402

from bench import operations  # noqa: E402
from bench.contenders import random_ids  # noqa: E402
from bench.shapes import TOY, TrainingShape  # noqa: E402
from fastbrain import Optimizer, TokenBatch, TransformerConfig, TransformerLm, kernels  # noqa: E402
from fastbrain.kernels import fused, reference  # noqa: E402

CHAPTER = TransformerConfig(
    vocab_size=32_000,
    d_model=1024,
    n_layers=20,
    n_heads=16,
    n_kv_heads=4,
    head_dim=64,
    d_ff=2816,
    moe_d_ff=512,
    num_experts=8,
    experts_per_token=2,
    moe_layers=tuple(range(5, 20)),
    max_seq_len=1024,
)
STEPS = {
    "chapter": TrainingShape("chapter", CHAPTER, 8, 1024),
    "default MoE": TrainingShape("default MoE", TransformerConfig(), 16, 1024),
    "dense 101.7M": TrainingShape(
        "dense 101.7M",
        TransformerConfig(
            vocab_size=32_004,
            d_model=768,
            n_layers=16,
            n_heads=12,
            n_kv_heads=4,
            head_dim=64,
            d_ff=1408,
            moe_layers=(),
            max_seq_len=1024,
        ),
        8,
        1024,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="where JSON goes")
    parser.add_argument("--dry", action="store_true", help="every line at a toy size, on the CPU")
    parser.add_argument("--only", help="parts to run, separated by commas")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device here; add --dry to try every line on the CPU")
    parts: dict[str, Callable[[bool], Any]] = {
        "kernel tests": kernel_tests,
        "training": training,
        "operations": time_operations,
        "steps": time_steps,
    }
    wanted = arguments.only.split(",") if arguments.only else list(parts)
    document: dict[str, Any] = {"machine": machine(), "seconds": {}}
    print(json.dumps(document["machine"], indent=1))
    for name in wanted:
        start = time.perf_counter()
        try:
            document[name] = parts[name](arguments.dry)
        except Exception:
            document[name] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        document["seconds"][name] = round(time.perf_counter() - start, 1)
        # after every part, so that a run that is cut off leaves what it had
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{document['machine']['card'].replace(' ', '-')}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"== {name}: {document['seconds'][name]} s", flush=True)
    failed = [n for n in wanted if isinstance(document[n], dict) and "failed" in document[n]]
    print(
        f"written to {path.name}; " + (f"FAILED: {', '.join(failed)}" if failed else "all passed")
    )
    sys.exit(1 if failed else 0)


def machine() -> dict[str, str]:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": "bench/device_check.sh",
    }


def kernel_tests(dry: bool) -> dict[str, Any]:
    """The kernels' own tests: on a GPU they run the compiled kernels, those marked gpu included."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "not slow", "--maxfail=40", "tests/test_fused_training.py"]
    command += ["-x", "-k", "waits"] if dry else ["tests/kernels", "-n", "8"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=270, check=False
    )
    text = done.stdout[-60_000:]
    print(text[-9000:])
    summary = text.strip().splitlines()[-1] if text.strip() else done.stderr[-2000:]
    result = {"summary": summary}
    return result if done.returncode == 0 else result | {"failed": text}


def training(dry: bool) -> dict[str, Any]:
    """50 steps of a small MoE model, fused against reference, and two fused runs bit for bit."""
    steps = 2 if dry else 50
    shape = TOY["moe"] if dry else TrainingShape("small", TransformerConfig(n_layers=4), 4, 512)
    losses = {}
    for name, twin in (("fused", fused), ("again", fused), ("reference", reference)):
        lm = TransformerLm(shape.config, Optimizer.adam(1e-3), seed=1, mixed_precision=True)
        if not dry:
            lm.to_cuda()
        ids = random_ids(shape)
        found = []
        with kernels.use(twin):
            for _ in range(steps):
                lm.zero_grad()
                found.append(lm.accumulate_step(TokenBatch(next(ids))).total())
                lm.step_clipped(1.0, 1.0)
        losses[name] = torch.stack(found).double().cpu()
    apart = ((losses["fused"] - losses["reference"]).abs() / losses["reference"]).max().item()
    result: dict[str, Any] = {
        "steps": steps,
        "fused": losses["fused"].tolist(),
        "reference": losses["reference"].tolist(),
        "largest relative difference": apart,
        "equal bits": torch.equal(losses["fused"], losses["again"]),
    }
    print({k: v for k, v in result.items() if k not in ("fused", "reference")})
    if apart > 2e-2 or not result["equal bits"]:
        result["failed"] = "the losses differ"
    return result


def time_operations(dry: bool) -> list[dict[str, Any]]:
    """Milliseconds of every operation and its peers, in turns."""
    sizes = operations.TOY if dry else operations.CHAPTER
    device = torch.device("cpu" if dry else "cuda")
    rows = []
    for case in operations.cases(sizes, device, peers=not dry):
        row: dict[str, Any] = {"name": case.name, "bytes": case.bytes, "flops": case.flops}
        row["ms"], row["errors"] = {}, {}
        for name, run in case.contenders.items():
            try:
                run()
                row["ms"][name] = None if dry else _milliseconds(run)
            except Exception as error:
                row["errors"][name] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.append(row)
        print(_line(row), flush=True)
        if not dry:
            torch.cuda.empty_cache()
    return rows


def _milliseconds(run: Callable[[], Any]) -> float:
    result: float = triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median")
    return result


def _line(row: dict[str, Any]) -> str:
    ms = row["ms"]
    text = f"{row['name']:34}" + "  ".join(f"{n} {t:.3f}" for n, t in ms.items() if t is not None)
    if ms.get("fused"):
        if row["flops"]:
            text += f"  {row['flops'] / ms['fused'] / 1e9:.0f} TFLOPS"
        if row["bytes"]:
            text += f"  {row['bytes'] / ms['fused'] / 1e6:.0f} GB/s"
        peers = [t for n, t in ms.items() if n not in ("fused", "reference") and t]
        if peers:
            text += f"  {min(peers) / ms['fused']:.2f} x the fastest peer"
    return text + (f"  {row['errors']}" if row["errors"] else "")


def time_steps(dry: bool) -> list[dict[str, Any]]:
    """Tokens per second and peak memory of whole training steps, fused and reference."""
    rows = []
    for shape in TOY.values() if dry else STEPS.values():
        row: dict[str, Any] = {"shape": str(shape), "tokens per s": {}, "peak MiB": {}}
        for name, twin in (("fused", fused), ("reference", reference)):
            try:
                with kernels.use(twin):
                    speed, peak = _step_speed(shape, dry)
                row["tokens per s"][name], row["peak MiB"][name] = round(speed), round(peak)
            except Exception as error:
                row.setdefault("errors", {})[name] = f"{type(error).__name__}: {str(error)[:300]}"
            if not dry:
                torch.cuda.empty_cache()
        rows.append(row)
        print(row, flush=True)
    return rows


def _step_speed(shape: TrainingShape, dry: bool) -> tuple[float, float]:
    lm = TransformerLm(shape.config, seed=1, mixed_precision=True)
    if not dry:
        lm.to_cuda()
        torch.cuda.reset_peak_memory_stats()
    ids = random_ids(shape)
    batches = [TokenBatch(next(ids)) for _ in range(2)]

    def steps(count: int) -> float:
        if not dry:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            lm.zero_grad()
            lm.accumulate_step(batches[i % 2])
            lm.step_clipped(1.0, 1.0)
        if not dry:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    steps(1 if dry else 3)
    seconds = steps(1 if dry else 10) / (1 if dry else 10)
    peak = 0 if dry else torch.cuda.max_memory_allocated() / 2**20
    return shape.tokens / seconds, peak


if __name__ == "__main__":
    main()
