"""How well a model predicts a token file: its losses over windows, summed in FP64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fastbrain.errors import InvalidDataset
from fastbrain.lm import TransformerLm
from fastbrain.losses import TotalLoss, file_losses
from fastbrain.tokens import TokenBatch, TokenFile


class Scored(NamedTuple):
    """The mean loss in nats, and how many tokens it is the mean of."""

    loss: float
    predicted: int

    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large a number."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def scored(
    model: TransformerLm,
    tokens: TokenFile,
    sequences: int,
    seq_len: int,
    every_token: bool,
    progress: Callable[[int], object],
) -> Scored:
    """The loss over a file, each token weighted alike.

    Args:
        model: what predicts.
        tokens: what is predicted.
        sequences: windows at a time; the result does not depend on it.
        seq_len: tokens of a window.
        every_token: windows overlap by one token and the last may be short, so that each token
            but the file's first is predicted once; otherwise they lie side by side as in
            `TransformerLm.evaluate_file`: the first token of each is only read, and so is the
            rest that fills no window.
        progress: told how many tokens were read so far.

    Raises:
        InvalidDataset: there is nothing to predict.
        TokenOutOfRange: the file has ids that the model has not.
    """
    read = 0

    def evaluate(batch: TokenBatch) -> TotalLoss:
        nonlocal read
        losses = model.evaluate(batch)
        read += batch.rows() * batch.seq_len()
        progress(read)
        return losses

    if every_token:
        return _overlapping(evaluate, tokens, sequences, seq_len)
    found = file_losses(evaluate, tokens, sequences, seq_len)
    return Scored(float(found.lm_loss), int(found.predicted))


def _overlapping(
    evaluate: Callable[[TokenBatch], TotalLoss], tokens: TokenFile, sequences: int, seq_len: int
) -> Scored:
    targets, step = tokens.tokens() - 1, seq_len - 1
    if targets < 1:
        raise InvalidDataset(f"{tokens.path} has one token, and none after it to predict")
    whole = targets // step
    loss_sum, predicted = torch.zeros((), dtype=torch.float64), 0
    offsets = [index * step for index in range(whole)]
    groups = [(offsets[at : at + sequences], seq_len) for at in range(0, whole, sequences)]
    if targets % step:
        groups.append(([whole * step], targets % step + 1))
    for group, length in groups:
        losses = evaluate(tokens.windows(group, length))
        loss_sum = loss_sum.to(losses.lm_loss_sum.device) + losses.lm_loss_sum.double()
        predicted += len(group) * (length - 1)
    return Scored(float(loss_sum / predicted), predicted)
