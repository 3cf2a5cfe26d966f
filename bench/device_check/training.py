"""A training run on the kernels, against the same run on the reference, and against itself.

The rule of the tests holds for the losses: truth is the reference in FP32, and the kernels may
be off by twice what the reference in mixed precision is, and the slack of BF16.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.device_check.models import batch_shape, batches, configs, model
from bench.device_check.rule import numerics, release, same_bits
from fastbrain import TransformerConfig, kernels
from fastbrain.kernels import fused, reference


class Run(NamedTuple):
    """Losses (steps), FP64 on the CPU, and the parameters that came of them."""

    losses: Tensor
    parameters: list[Tensor]


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name, config in configs(dry).items():
        yield name, partial(_trained, config, dry)


def _trained(config: TransformerConfig, dry: bool) -> dict[str, Any]:
    steps = 2 if dry else 50
    runs = {
        "fused": _run(config, fused, True, steps, dry),
        "again": _run(config, fused, True, steps, dry),
        "reference": _run(config, reference, True, steps, dry),
        "reference FP32": _run(config, reference, False, steps, dry),
    }
    for a, b in zip(*(_all(runs[name]) for name in ("fused", "again")), strict=True):
        assert same_bits(a, b), "two runs on the kernels ended with other bits"
    ours, theirs, exact = (runs[n].losses for n in ("fused", "reference", "reference FP32"))
    numerics.assert_accurate(ours, theirs, exact, torch.bfloat16, name="losses")
    # two steps of a toy teach nothing
    assert dry or float(ours[-1]) < float(ours[0]) - 1, f"nothing was learned: {ours.tolist()}"
    slack = numerics.SLACK[torch.bfloat16] * float(exact.abs().max())
    allowed = 2 * float((theirs - exact).abs().max()) + slack
    worst = float((ours - exact).abs().max()) / allowed
    return {
        "steps": steps,
        "losses": {name: run.losses.tolist() for name, run in runs.items() if name != "again"},
        "worst": worst,
        "line": f"loss {ours[0]:.3f} to {ours[-1]:.3f} in {steps} steps, twice the same bits; "
        f"{worst:.0%} of what it may be off by",
    }


def _all(run: Run) -> list[Tensor]:
    return [run.losses, *run.parameters]


def _run(
    config: TransformerConfig, twin: ModuleType, mixed_precision: bool, steps: int, dry: bool
) -> Run:
    lm = model(config, dry, mixed_precision)
    losses = []
    with kernels.use(twin):
        for batch in islice(batches(config.vocab_size, *batch_shape(dry)), steps):
            lm.zero_grad()
            losses.append(lm.accumulate_step(batch).total())
            lm.step_clipped(1.0, 1.0)
    parameters = [p.detach().cpu() for p in lm.module.parameters()]
    found = Run(torch.stack(losses).double().cpu(), parameters)
    del lm
    release()
    return found
