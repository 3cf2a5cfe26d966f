"""Packing changes what a step costs, not what it teaches: losses, gradients, shares."""

import dataclasses

import pytest
import torch
from models import SHAPES, model, random_ids

from fastbrain import TokenBatch, TransformerLm
from fastbrain.losses import summed_losses

DOCUMENTS = [random_ids(n, seed=n) for n in (7, 9, 5, 12, 6)]
ROWS = [[0, 1, 2], [3, 4]]
WIDTH = 24


def is_target(document: torch.Tensor) -> torch.Tensor:
    """The second half is the response."""
    return torch.arange(len(document)) >= len(document) // 2


def packed() -> TokenBatch:
    ids = torch.zeros(len(ROWS), WIDTH, dtype=torch.int64)
    segments = torch.zeros(len(ROWS), WIDTH, dtype=torch.int32)
    flags = torch.zeros(len(ROWS), WIDTH, dtype=torch.bool)
    lengths = torch.zeros(len(ROWS), dtype=torch.int64)
    for row, members in enumerate(ROWS):
        at = 0
        for number, member in enumerate(members):
            document = DOCUMENTS[member]
            here = slice(at, at + len(document))
            ids[row, here], segments[row, here] = document, number
            flags[row, here] = is_target(document)
            at += len(document)
        segments[row, at:], lengths[row] = len(members), at
    return TokenBatch.packed(ids, segments, flags, lengths)


def alone() -> list[TokenBatch]:
    return [TokenBatch([d]).with_loss_mask(is_target(d)) for d in DOCUMENTS]


@pytest.fixture(params=SHAPES)
def lm(request) -> TransformerLm:
    # the routing losses are means over a batch, and so depend on what is in it
    weights = {"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    return model(dataclasses.replace(SHAPES[request.param], **weights))


def test_the_loss_of_a_packed_batch_is_that_of_its_documents(lm):
    together, apart = lm.evaluate(packed()), summed_losses(lm.evaluate, alone())
    assert int(together.predicted) == int(apart.predicted) == 21
    assert abs(float(together.lm_loss) - float(apart.lm_loss)) <= 1e-6 * float(apart.lm_loss)


def test_the_gradient_of_a_packed_batch_is_that_of_its_documents(lm):
    lm.accumulate_step(packed())
    together = [grad.clone() for _, grad in lm.gradients()]
    lm.zero_grad()
    for batch in alone():
        lm.accumulate_step(batch, weight=batch.predicted() / 21)
    for (name, ours), whole in zip(lm.gradients(), together, strict=True):
        assert (ours - whole).abs().max() <= 2e-6 * max(float(whole.abs().max()), 1e-3), name


def test_padding_is_routed_to_no_expert():
    lm = model(SHAPES["moe"])
    wide = packed()
    narrow = TokenBatch.packed(
        wide.ids[:, :21], wide.segments[:, :21], torch.ones(2, 21, dtype=torch.bool), wide.lengths
    )
    padded, tight = (float(lm.evaluate(each).auxiliary_loss) for each in (wide, narrow))
    assert padded == pytest.approx(tight, rel=1e-6)


def test_positions_reach_the_model_counted_from_the_beginning_of_each_document(lm, monkeypatch):
    """A rotation cares for distances alone, so no loss would show it; a long row would."""
    forward, seen = lm.module.forward, []

    def watched(*args, **options):
        seen.append(options["positions"])
        return forward(*args, **options)

    monkeypatch.setattr(lm.module, "forward", watched)
    lm.evaluate(packed())
    assert seen[0][0, :21].tolist() == [*range(7), *range(9), *range(5)]
