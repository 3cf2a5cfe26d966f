"""Batches: padding, shift and masks, and errors in the order of the reference system."""

import numpy as np
import pytest
import torch

from fastbrain.errors import EmptyDataset, InvalidConfig
from fastbrain.tokens import TokenBatch


def test_uneven_sequences_are_padded_with_zeros_on_the_right():
    batch = TokenBatch([[7, 8, 9, 6], [5, 4], [1, 2, 3]])
    assert batch.ids.tolist() == [[7, 8, 9, 6], [5, 4, 0, 0], [1, 2, 3, 0]]
    assert batch.lengths.tolist() == [4, 2, 3]
    assert batch.ids.dtype == batch.lengths.dtype == torch.int64
    assert (batch.batch(), batch.seq_len(), batch.rows()) == (3, 4, 12)
    assert batch.max_id() == 9
    assert repr(batch) == "TokenBatch(3 x 4, 6 predicted)"


def test_every_row_is_scored_against_the_next_token_of_its_sequence():
    targets, mask = TokenBatch([[7, 8, 9, 6], [5, 4], [1, 2, 3]]).targets()
    assert targets.tolist() == [[8, 9, 6, 0], [4, 0, 0, 0], [2, 3, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert targets.dtype == torch.int64
    assert mask.dtype == torch.bool


def test_predicts_and_predicted_agree_with_the_mask():
    batch = TokenBatch([[7, 8, 9, 6], [5, 4]])
    assert [batch.predicts(row) for row in range(8)] == batch.targets()[1].flatten().tolist()
    assert batch.predicted() == 4


def test_a_row_outside_the_batch_is_refused():
    batch = TokenBatch([[7, 8]])
    for row in (-1, 2):
        with pytest.raises(InvalidConfig, match="rows 0 to 1"):
            batch.predicts(row)


def test_layout_marks_real_tokens_only_where_there_is_padding():
    even = TokenBatch([[1, 2], [3, 4]])
    assert not even.is_padded()
    assert even.layout().valid is None
    uneven = TokenBatch([[1, 2, 3], [3, 4]])
    assert uneven.is_padded()
    layout = uneven.layout()
    assert (layout.batch, layout.seq_len) == (2, 3)
    assert layout.valid.tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    "sequences",
    [
        [[1, 2, 3], [4, 5, 6]],
        ((1, 2, 3), range(4, 7)),
        [np.array([1, 2, 3], np.uint16), np.array([4, 5, 6], np.int8)],
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6], dtype=torch.int32)],
        np.array([[1, 2, 3], [4, 5, 6]], np.uint32),
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
    ],
    ids=["lists", "tuples and ranges", "arrays", "tensors", "2-D array", "2-D tensor"],
)
def test_sequences_may_be_lists_arrays_or_tensors(sequences):
    for make in (TokenBatch, TokenBatch.new):
        assert make(sequences).ids.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_ids_are_a_copy():
    source = np.array([[1, 2, 3], [4, 5, 6]])
    batch = TokenBatch(source)
    source[0, 0] = 100
    assert batch.max_id() == 6


def test_no_sequences_are_an_empty_dataset():
    for nothing in ([], np.empty((0, 8), np.int64)):
        with pytest.raises(EmptyDataset):
            TokenBatch(nothing)


@pytest.mark.parametrize("short", [[], [1]])
def test_a_sequence_without_anything_to_predict_is_refused_with_its_length(short):
    with pytest.raises(InvalidConfig, match=rf"sequence 1 has {len(short)} tokens; .*at least 2"):
        TokenBatch([[1, 2], short])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -2], "at 1 there is -2"),
        (np.array([1, 2**63], np.uint64), "at 1 there is 9223372036854775808"),
        ([1, 2**70], "position 1 is 1180591620717411303424"),
        ([1.0, 2.0], "position 0 is 1.0"),
        ([True, False], "position 0 is True"),
        (["a", "b"], "position 0 is 'a'"),
        ([[1, 2], [3]], "one row of integers"),
        (torch.tensor([1.0, 2.0]), "tensor is torch.float32"),
        (5, "one row of integers"),
    ],
)
def test_what_is_no_id_is_refused_by_sequence_and_place(ids, message):
    with pytest.raises(InvalidConfig, match=rf"ids of sequence 1.*{message}"):
        TokenBatch([[1, 2], ids])


def test_the_largest_id_of_64_bits_is_one():
    assert TokenBatch([[0, 2**63 - 1]]).max_id() == 2**63 - 1


def test_a_mask_marks_targets_and_not_the_rows_that_predict_them():
    batch = TokenBatch([[7, 8, 9, 6], [5, 4]])
    masked = batch.with_loss_mask([False, False, True, False, False, True, False, False])
    assert masked.targets()[1].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert masked.targets()[0].tolist() == [[0, 9, 0, 0], [4, 0, 0, 0]]
    assert masked.predicted() == 2
    assert batch.predicted() == 4  # which is left as it was


@pytest.mark.parametrize(
    "kind", [list, np.array, torch.tensor, lambda f: np.array(f).reshape(2, 4)]
)
def test_first_flags_and_padding_cannot_be_turned_on(kind):
    batch = TokenBatch([[7, 8, 9, 6], [5, 4]])
    assert batch.with_loss_mask(kind([True] * 8)).predicted() == batch.predicted() == 4


@pytest.mark.parametrize(
    "flags", [[1, 0, 0, 0, 1, 0, 1, 1], [0] * 8], ids=["first and padding", "none"]
)
def test_a_mask_that_leaves_nothing_to_predict_is_refused(flags):
    with pytest.raises(InvalidConfig, match="nothing to predict"):
        TokenBatch([[7, 8, 9, 6], [5, 4]]).with_loss_mask(flags)


def test_a_mask_of_another_size_is_refused_before_it_is_looked_at():
    with pytest.raises(InvalidConfig, match=r"3 flags; .* needs 8"):
        TokenBatch([[7, 8, 9, 6], [5, 4]]).with_loss_mask([0, 0, 0])


def test_flags_that_are_neither_on_nor_off_are_refused():
    with pytest.raises(InvalidConfig, match="0 and 1"):
        TokenBatch([[7, 8]]).with_loss_mask([0.5, 2])


def test_supervised_predicts_the_responses_only():
    # ids, lengths and predicting rows as RustingBrain by Vasyl Trefilov computes them
    pairs = [([52, 9, 3], [32, 34]), ([4], [44]), ([], [1, 18, 15])]
    batch = TokenBatch.supervised(pairs)
    assert batch.ids.tolist() == [[52, 9, 3, 32, 34], [4, 44, 0, 0, 0], [1, 18, 15, 0, 0]]
    assert batch.lengths.tolist() == [5, 2, 3]
    assert batch.targets()[0].tolist() == [[0, 0, 32, 34, 0], [44, 0, 0, 0, 0], [18, 15, 0, 0, 0]]
    assert batch.predicted() == 5


def test_supervised_takes_arrays_and_tensors():
    batch = TokenBatch.supervised([(np.array([1, 2]), torch.tensor([3, 4]))])
    assert batch.ids.tolist() == [[1, 2, 3, 4]]
    assert batch.predicted() == 2


def test_supervised_without_pairs_is_an_empty_dataset():
    with pytest.raises(EmptyDataset):
        TokenBatch.supervised([])


def test_a_pair_of_one_token_is_too_short_before_its_response_is_empty():
    with pytest.raises(InvalidConfig, match="sequence 1 has 1 tokens"):
        TokenBatch.supervised([([1, 2], []), ([1], [])])


def test_an_empty_response_is_refused_by_its_pair():
    with pytest.raises(InvalidConfig, match="response of pair 1 is empty"):
        TokenBatch.supervised([([1], [2]), ([3, 4], [])])


def test_a_slice_keeps_width_masks_and_lengths():
    batch = TokenBatch([[1, 2, 3], [4, 5], [6, 7, 8]])
    batch = batch.with_loss_mask([0, 1, 1, 0, 1, 0, 0, 0, 1])
    part = batch.slice(1, 3)
    assert part.ids.tolist() == [[4, 5, 0], [6, 7, 8]]
    assert part.lengths.tolist() == [2, 3]
    assert part.targets()[1].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert sum(batch.slice(i, i + 1).predicted() for i in range(3)) == batch.predicted()


def test_a_slice_may_predict_nothing():
    batch = TokenBatch([[1, 2], [4, 5]]).with_loss_mask([0, 1, 0, 0])
    assert batch.slice(1, 2).predicted() == 0


@pytest.mark.parametrize("bounds", [(-1, 1), (0, 3), (1, 1), (2, 1)])
def test_a_slice_outside_the_batch_is_refused(bounds):
    with pytest.raises(InvalidConfig, match="2 sequences"):
        TokenBatch([[1, 2], [4, 5]]).slice(*bounds)
