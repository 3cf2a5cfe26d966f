"""Training steps of three models: tokens per second, and peak memory against the plan.

fastbrain eager and as CUDA graphs, and the peers that are there: the same model in plain PyTorch
(SDPA, grouped_mm, autocast, fused AdamW), Hugging Face's, and plain PyTorch under `torch.compile`
where there is time for it.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.compiled_peer import CompiledPeer
from bench.contenders import Ours, random_ids
from bench.device_check.journal import Skipped
from bench.device_check.models import batch_shape, configs
from bench.graphed import Graphed
from bench.peers import Peer, experts_implementations
from bench.plain_model import PlainModel
from bench.shapes import CARD, TrainingShape
from bench.torch_trainee import TorchTrainee
from fastbrain import TransformerConfig, kernels
from fastbrain.kernels import fused
from fastbrain.plan import CARDS, Card, find_card, known_card, plan

SHAPES = {
    "chapter": CARD["moe"],
    "default MoE": TrainingShape("moe", TransformerConfig(), 4, 1024),
    "dense 101.7M": CARD["dense"],
}
ROUNDS = 3
COMPILING_S = 60.0


class Plain(TorchTrainee):
    """The plain PyTorch model as it is, operation by operation."""

    name = "plain PyTorch"

    def __init__(self, shape: TrainingShape, device: torch.device) -> None:
        torch.manual_seed(0)
        super().__init__(PlainModel(shape.config), device)

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return None

    def use(self, precision: str, option: str | None) -> None:
        self.precision = precision

    def loss(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(ids)
        return out


def cases(dry: bool) -> Iterator[tuple[Any, ...]]:
    toy = TrainingShape("moe", configs(True)["MoE"], *batch_shape(True))
    shapes = {"toy": toy} if dry else SHAPES
    # the compiled ones last: they are the slowest to start
    for trainee in (Ours, Graphed, Plain, Peer, CompiledPeer):
        for name, shape in shapes.items():
            needs_s = [COMPILING_S] if trainee is CompiledPeer and not dry else []
            yield f"{name}, {trainee.name}", partial(_timed, trainee, shape, dry), *needs_s


def _timed(trainee: Any, shape: TrainingShape, dry: bool) -> dict[str, Any]:
    device = _device(dry)
    ours = trainee in (Ours, Graphed)
    if (missing := trainee.missing(device)) is not None:
        raise Skipped(missing)
    # on a card of the table even a dry run can be planned for
    planned = plan(shape.config, CARDS["h200"] if dry else _card(), shape.batch, shape.seq_len)
    if not dry and planned.memory.peak_bytes > torch.cuda.mem_get_info()[0]:
        raise Skipped(f"the plan says it takes {planned.memory.peak_bytes / 2**30:.1f} GiB")
    try:
        with kernels.use(fused):
            found = _speed(trainee, shape, device, dry)
    except Exception as error:
        if ours:
            raise
        raise Skipped(f"{type(error).__name__}: {str(error)[:300]}") from error
    row: dict[str, Any] = {"shape": str(shape), "tokens": shape.tokens, **found}
    if ours:
        row |= {
            "total_parameters": planned.counts.total,
            "active_parameters": planned.counts.active,
            "predicted_tokens_per_s": planned.tokens_per_s,
        }
    if trainee is Ours:
        # graphs keep memory apart, which the plan knows nothing of
        row["predicted_peak_bytes"] = planned.memory.peak_bytes
    return row | {"line": _line(row)}


def _device(dry: bool) -> torch.device:
    return torch.device("cpu" if dry else "cuda")


def _card() -> Card:
    return known_card(torch.cuda.get_device_name()) or find_card("this-machine")


def _speed(trainee: Any, shape: TrainingShape, device: torch.device, dry: bool) -> dict[str, Any]:
    option = None
    if trainee is Peer and shape.config.moe_layers:
        # the fastest that needs nothing else installed
        usable = [name for name, reason in experts_implementations(shape) if reason is None]
        option = "grouped_mm" if "grouped_mm" in usable else usable[0]
    model = trainee(shape, device)
    model.use("bf16", option)
    ids = random_ids(shape)
    data = [next(ids) for _ in range(2)]

    def seconds(steps: int) -> float:
        _wait(device)
        begun = time.perf_counter()
        for i in range(steps):
            model.zero_grad()
            model.accumulate(data[i % 2])
            model.update()
        _wait(device)
        return time.perf_counter() - begun

    seconds(1 if dry else 3)
    if dry:
        return {"tokens_per_s": None, "spread": None, "peak_bytes": None}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # about a second a round, on any card
    steps = max(2, min(10, int(2 / seconds(2))))
    rates = [steps * shape.tokens / seconds(steps) for _ in range(ROUNDS)]
    # a graph's memory is not allocated again when it is replayed
    held = torch.cuda.max_memory_reserved if trainee is Graphed else torch.cuda.max_memory_allocated
    return {
        "tokens_per_s": statistics.median(rates),
        "spread": max(rates) / min(rates),
        "peak_bytes": held(),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _line(row: dict[str, Any]) -> str:
    if row["tokens_per_s"] is None:
        return "ran"
    text = f"{row['tokens_per_s']:,.0f} tokens/s, peak {row['peak_bytes'] / 2**20:,.0f} MiB"
    if "predicted_peak_bytes" in row:
        text += f", {row['predicted_peak_bytes'] / 2**20:,.0f} predicted"
    return text
