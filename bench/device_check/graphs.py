"""A CUDA graph of a training step, replayed on new data at new rates, against eager steps."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.device_check.graphed import GraphedStep
from bench.device_check.models import batch_shape, batches, configs, model
from bench.device_check.rule import numerics, same_bits
from fastbrain import TransformerConfig, kernels
from fastbrain.kernels import fused

RATES = (1e-3, 5e-3, 1e-4)


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name, config in configs(dry).items():
        for mixed_precision in (True, False):
            # a toy of each model and of each precision, not of all four pairs
            if not dry or mixed_precision == (name == "MoE"):
                kind = "mixed precision" if mixed_precision else "FP32"
                yield f"{name}, {kind}", partial(_compared, config, mixed_precision, dry)


def _compared(config: TransformerConfig, mixed_precision: bool, dry: bool) -> dict[str, Any]:
    eager, graphed = (model(config, dry, mixed_precision) for _ in range(2))
    stream = batches(config.vocab_size, *batch_shape(dry))
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    with kernels.use(fused):
        # captured on a batch, and warmed up at a rate, that no step has
        step = GraphedStep(graphed, next(stream), capture=not dry)
        for rate, batch in zip(RATES, islice(stream, len(RATES)), strict=True):
            step(batch, rate)
            ours += [step.loss.clone(), step.norm.clone()]
            eager.set_learning_rate(rate)
            eager.zero_grad()
            theirs.append(eager.accumulate_step(batch).total())
            theirs.append(eager.step_clipped(1.0, 1.0))
    losses = [float(x) for x in ours[::2]]
    ours += [p.detach() for p in graphed.module.parameters()]
    theirs += [p.detach() for p in eager.module.parameters()]
    equal = all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    if not equal:
        kind = torch.bfloat16 if mixed_precision else torch.float32
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            numerics.assert_accurate(a, b, b.double(), kind, name=f"number {place}")
    captured = not dry
    how = "the same bits" if equal else "other bits, within the rule"
    return {
        "captured": captured,
        "equal_bits": equal,
        "losses": losses,
        "line": f"{'replayed' if captured else 'not captured'}, {len(RATES)} steps: {how}",
    }
