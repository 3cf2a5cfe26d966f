"""What ranks do wrong in loops of their own, and what they are told."""

from collections.abc import Callable

import torch
from models import SHAPES, model, random_ids

from fastbrain import FastBrainError, Ranks, TokenBatch, TransformerLm, cli


def said(call: Callable[[], object]) -> str | None:
    try:
        call()
    except FastBrainError as error:
        return str(error)
    return None


def slips() -> list[str | None]:
    """The answers to one slip after the other."""
    ranks = Ranks.join()
    lm, batch = model(SHAPES["dense"]), TokenBatch(random_ids(2, 8, seed=ranks.rank))
    found = [said(lambda: lm.distribute("ddp")), said(Ranks.join)]
    lm.distribute(ranks, "ddp")
    found.append(said(lambda: lm.train_step_batch(batch)))
    lm.accumulate_step(batch, weight=0.5)
    found.append(said(lambda: lm.accumulate_step(batch, weight=0.5)))
    lm.zero_grad()
    with lm.no_sync():
        lm.accumulate_step(batch, weight=0.5)
    found.append(said(lambda: lm.step(1.0)))
    found.append(said(lambda: lm.step_clipped(1.0, 1.0)))
    # and what is right after all of them
    lm.accumulate_step(batch, weight=0.5)
    lm.step_clipped(1.0, 1.0)
    lm.accumulate_step(batch)
    lm.step(1.0)
    ranks.leave()
    return found


def unlike(parallel: str) -> list[float]:
    """The sum of the weights of each rank's own model, and of what became of them."""
    ranks = Ranks.join()
    lm = TransformerLm(SHAPES["moe"], seed=ranks.rank)
    before = [float(p.double().sum()) for p in lm.module.parameters()]
    lm.distribute(ranks, parallel)
    whole = lm.gathered()
    after = (
        before if whole is None else [float(p.double().sum()) for p in whole.module.parameters()]
    )
    assert torch.tensor(after).isfinite().all()
    ranks.leave()
    return [sum(before), sum(after)]


def verb(words: list[str]) -> int:
    """Any verb of the command line; its exit code."""
    return cli.main(words)
