"""Rows of several documents: what predicts what, where each begins, and that none leaks."""

import pytest
import torch
from models import SHAPES, model, random_ids

from fastbrain import TokenBatch
from fastbrain.errors import InvalidConfig

T, F = True, False


def packed(documents, width, targets=None):
    """Rows of documents, each a list of ids; every token is marked unless `targets` says."""
    ids = torch.zeros(len(documents), width, dtype=torch.int64)
    segments = torch.zeros(len(documents), width, dtype=torch.int32)
    is_target = torch.zeros(len(documents), width, dtype=torch.bool)
    lengths = torch.zeros(len(documents), dtype=torch.int64)
    for r, row in enumerate(documents):
        at = 0
        for number, document in enumerate(row):
            end = at + len(document)
            ids[r, at:end] = torch.as_tensor(document)
            segments[r, at:end] = number
            is_target[r, at:end] = True
            at = end
        segments[r, at:] = len(row)
        lengths[r] = at
    if targets is not None:
        is_target = torch.tensor(targets)
    return TokenBatch.packed(ids, segments, is_target, lengths)


def test_no_document_predicts_another_or_padding():
    batch = packed([[[5, 6, 7], [8, 9]], [[1, 2], [3, 4, 5, 6, 7]]], 7)
    ids, predicts = batch.targets()
    assert predicts.tolist() == [[T, T, F, T, F, F, F], [T, F, T, T, T, T, F]]
    assert ids[predicts].tolist() == [6, 7, 9, 2, 4, 5, 6, 7]
    assert ids[~predicts].tolist() == [0] * 6
    assert batch.predicted() == 8
    assert batch.valid_tokens() == 12


def test_only_marked_tokens_are_predicted():
    marked = [[T, F, T, T, T, T, T]]
    batch = packed([[[5, 6, 7], [8, 9]]], 7, marked)
    # the first of a document and padding are marked to no effect
    assert batch.targets()[1].tolist() == [[F, T, F, T, F, F, F]]


def test_positions_count_from_the_beginning_of_each_document():
    batch = packed([[[5, 6, 7], [8], [9, 1]], [[1, 2, 3, 4, 5, 6, 7]]], 7)
    assert batch.positions().tolist() == [[0, 1, 2, 0, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.positions().dtype == torch.int32
    assert TokenBatch([[1, 2, 3]]).positions() is None


def test_slices_and_other_masks_keep_documents_apart():
    batch = packed([[[5, 6, 7], [8, 9]], [[1, 2], [3, 4, 5, 6, 7]]], 7)
    whole_ids, whole = batch.targets()
    parts = [batch.slice(0, 1), batch.slice(1, 2)]
    assert torch.cat([p.targets()[1] for p in parts]).equal(whole)
    assert torch.cat([p.targets()[0] for p in parts]).equal(whole_ids)
    assert torch.cat([p.positions() for p in parts]).equal(batch.positions())
    assert torch.cat([p.segments for p in parts]).equal(batch.segments)
    assert [p.lengths.tolist() for p in parts] == [[5], [7]]
    everything = batch.with_loss_mask(torch.ones(2, 7, dtype=torch.bool))
    assert everything.targets()[1].equal(whole)


def test_a_document_begins_wherever_the_number_changes():
    # after 0 comes 7: documents may have been left out
    ids, flags = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool)
    segments = torch.tensor([[0, 0, 7, 7]], dtype=torch.int32)
    batch = TokenBatch.packed(ids, segments, flags, torch.tensor([4]))
    assert batch.positions().tolist() == [[0, 1, 0, 1]]
    assert batch.targets()[1].tolist() == [[T, F, T, F]]


SOUND = {
    "ids": torch.ones(1, 4, dtype=torch.int64),
    "segments": torch.zeros(1, 4, dtype=torch.int32),
    "is_target": torch.ones(1, 4, dtype=torch.bool),
    "lengths": torch.tensor([4]),
}


def of_shape(*shape):
    made = {name: each.new_zeros(shape) for name, each in SOUND.items()}
    return made | {"lengths": torch.full(shape[:1], 1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([0])}, "lengths holds 0; each must be from 1 to S, which is 4"),
        ({"lengths": torch.tensor([5])}, "lengths holds 5; each must be from 1 to S, which is 4"),
        ({"lengths": torch.tensor([[4]])}, r"and lengths \(B,\), got .* \(1, 1\)\]"),
        ({"lengths": torch.tensor([4.0])}, "lengths is torch.float32; it must hold whole numbers"),
        (of_shape(4), r"must have one shape, \(B, S\), .* got \[\(4,\)"),
        (of_shape(2, 3, 4), r"must have one shape, \(B, S\), .* got \[\(2, 3, 4\)"),
        (of_shape(0, 4), r"ids has shape \(0, 4\); a batch needs a row"),
        (of_shape(2, 1), r"ids has shape \(2, 1\); .*, and a row 2 tokens to predict one"),
        ({"ids": torch.tensor([[3, 2, -1, 4]])}, "ids holds -1; ids count from 0"),
        ({"ids": torch.ones(1, 4)}, "ids is torch.float32; it must hold whole numbers"),
        ({"is_target": torch.ones(1, 4)}, "is_target is torch.float32; it must be torch.bool"),
        ({"segments": torch.zeros(1, 4)}, "segments is torch.float32; it must hold whole numbers"),
        ({"segments": SOUND["is_target"]}, "segments is torch.bool; it must hold whole numbers"),
    ],
)
def test_what_is_no_batch_of_rows_is_refused_by_value_and_rule(changes, message):
    TokenBatch.packed(**SOUND)
    with pytest.raises(InvalidConfig, match=message):
        TokenBatch.packed(**SOUND | changes)


def test_shapes_that_differ_and_segments_that_fall_are_refused():
    ids, flags = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool)
    segments, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([4])
    with pytest.raises(InvalidConfig, match="must have one shape"):
        TokenBatch.packed(ids, segments[:, :3], flags, lengths)
    with pytest.raises(InvalidConfig, match="must have one shape"):
        TokenBatch.packed(ids, segments, flags, torch.tensor([4, 4]))
    falling = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32)
    with pytest.raises(InvalidConfig, match="must not decrease"):
        TokenBatch.packed(ids, falling, flags, lengths)


def logits(lm, batch):
    lm.module.eval()
    with torch.no_grad():
        found = lm.module(
            batch.ids,
            segments=batch.segments,
            positions=batch.positions(),
            valid=batch.layout().valid,
        )
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_not_moved_by_its_neighbors(shape):
    lm = model(SHAPES[shape])
    first, middle, last = (random_ids(n, seed=n).tolist() for n in (7, 9, 5))
    before = logits(lm, packed([[first, middle, last]], 24))
    changed = [[(i + 1) % 37 for i in first], middle, [(i + 3) % 37 for i in last]]
    after = logits(lm, packed([changed], 24))
    assert (before[:, :7] - after[:, :7]).abs().max() > 0.1
    moved = (before[:, 7:16] - after[:, 7:16]).abs().max()
    # experts get other rows beside those of the document, so a product on the CPU has another
    # shape and may sum in another order
    assert moved == 0 if shape == "dense" else moved <= 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_what_it_is_alone(shape):
    lm = model(SHAPES[shape])
    first, middle, last = (random_ids(n, seed=n).tolist() for n in (7, 9, 5))
    together = logits(lm, packed([[first, middle, last]], 24))
    alone = logits(lm, TokenBatch([middle]))
    moved = (together[:, 7:16] - alone).abs().max()
    assert moved <= 1e-6 * alone.abs().max()
