"""What a model loses on a batch, or on a whole file: sums and counts, and the means they give."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from fastbrain.errors import InvalidDataset
from fastbrain.tokens import TokenBatch, TokenFile


@dataclass(frozen=True)
class TotalLoss:
    """The losses of one batch, before the update that they lead to.

    Attributes:
        lm_loss: mean negative log-likelihood of the predicted tokens, in nats; 0-d.
        auxiliary_loss: the weighted routing losses, summed over MoE layers; 0-d.
        lm_loss_sum: the sum of which `lm_loss` is the mean; 0-d.
        predicted: how many tokens were predicted; 0-d int64.
    """

    lm_loss: Tensor
    auxiliary_loss: Tensor
    lm_loss_sum: Tensor
    predicted: Tensor

    def total(self) -> Tensor:
        """What training minimizes."""
        return self.lm_loss + self.auxiliary_loss

    def perplexity(self) -> Tensor:
        """exp(lm_loss)."""
        return self.lm_loss.exp()

    def detach(self) -> "TotalLoss":
        """The same numbers without their graph."""
        return TotalLoss(
            self.lm_loss.detach(),
            self.auxiliary_loss.detach(),
            self.lm_loss_sum.detach(),
            self.predicted,
        )


def batch_losses(module: nn.Module, batch: TokenBatch, device: torch.device) -> TotalLoss:
    """The losses of a batch, differentiable, of a `Transformer` on `device` or what wraps one."""
    targets, mask = batch.targets()
    valid = batch.layout().valid
    segments, positions = batch.segments, batch.positions()
    loss_sum, count, auxiliary = module(
        batch.ids.to(device, non_blocking=True),
        segments=None if segments is None else segments.to(device, non_blocking=True),
        positions=None if positions is None else positions.to(device, non_blocking=True),
        targets=targets.to(device, non_blocking=True),
        mask=mask.to(device, non_blocking=True),
        valid=None if valid is None else valid.to(device, non_blocking=True),
        max_rows=batch.predicted(),
    )
    return TotalLoss(loss_sum / count.clamp(min=1), auxiliary, loss_sum, count)


def file_losses(
    evaluate: Callable[[TokenBatch], TotalLoss], tokens: TokenFile, sequences: int, seq_len: int
) -> TotalLoss:
    """The losses over all windows of a file; see `TransformerLm.evaluate_file`."""
    found = summed_losses(evaluate, chunks(lambda index: tokens.chunk(index, sequences, seq_len)))
    if found is None:
        raise InvalidDataset(
            f"the file's {tokens.tokens()} tokens do not fill one window of {seq_len}; "
            "evaluate with a shorter seq_len, or hold out more text"
        )
    return found


def chunks(chunk: Callable[[int], TokenBatch | None]) -> Iterator[TokenBatch]:
    """The batches that `chunk` gives for 0, 1, ... until it gives none."""
    for index in count():
        batch = chunk(index)
        if batch is None:
            return
        yield batch


def summed_losses(
    evaluate: Callable[[TokenBatch], TotalLoss],
    batches: Iterable[TokenBatch],
    add: Callable[[Sequence[float]], Sequence[float]] | None = None,
) -> TotalLoss | None:
    """The losses over several batches, each token weighted alike, summed in FP64; None of none.

    Args:
        evaluate: gives a batch's losses.
        batches: of this process.
        add: sums numbers over the processes where others have more batches; takes what is lost in
            all, the auxiliary part, predictions and tokens.
    """
    loss_sum = auxiliary = torch.zeros((), dtype=torch.float64)
    predicted = torch.zeros((), dtype=torch.int64)
    tokens = 0
    for batch in batches:
        losses = evaluate(batch)
        device = losses.lm_loss.device
        loss_sum = loss_sum.to(device) + losses.lm_loss_sum.double()
        # its statistics are means over a batch's tokens
        auxiliary = auxiliary.to(device) + losses.auxiliary_loss.double() * batch.valid_tokens()
        predicted = predicted.to(device) + losses.predicted
        tokens += batch.valid_tokens()
    if add is not None:
        found = add([float(loss_sum), float(auxiliary), int(predicted), tokens])
        loss_sum, auxiliary = torch.tensor(found[:2], dtype=torch.float64).unbind()
        predicted, tokens = torch.tensor(int(found[2])), int(found[3])
    if tokens == 0:
        return None
    return TotalLoss(
        (loss_sum / predicted).float(), (auxiliary / tokens).float(), loss_sum.float(), predicted
    )
