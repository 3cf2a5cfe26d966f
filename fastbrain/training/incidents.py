"""What guard.jsonl says of a bad step: its numbers, its limits, and the text that it read."""

import math
from typing import Any

from fastbrain.training.corpus import Corpus
from fastbrain.training.guard import Guard
from fastbrain.training.recorder import Settled
from fastbrain.training.settings import Settings

# of the worst micro-batch; enough to find the text again, and to see what is wrong with it
ROWS, HEAD_TOKENS, HEAD_CHARACTERS = 16, 64, 200


def row(settled: Settled, guard: Guard, corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """The row of a skipped or spiking step.

    Every row's place in the corpus is there (its offset in a token file); text is of the
    micro-batch with the highest loss, or the first whose loss is not a number.
    """
    train = settings.train
    data_step = guard.data_step(settled.step - 1)
    offsets = corpus.origins(data_step, train.global_batch_size)
    micro = max(range(len(settled.micro_losses)), key=lambda i: _badness(settled.micro_losses[i]))
    size = int(train.micro_batch_size)
    rows = range(micro * size, (micro + 1) * size)[:ROWS]
    return {
        "kind": str(settled.verdict.kind),
        "step": settled.step,
        "data_step": data_step,
        "loss": settled.loss,
        "grad_norm": settled.grad_norm,
        "loss_limit": settled.verdict.loss_limit,
        "norm_limit": settled.verdict.norm_limit,
        "offsets": offsets,
        "micro": micro,
        "rows": [
            {"row": each, "offset": offsets[each], "text": _head(corpus, offsets[each])}
            for each in rows
        ],
    }


def _badness(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _head(corpus: Corpus, origin: int) -> str:
    return corpus.text(corpus.head(origin, HEAD_TOKENS))[:HEAD_CHARACTERS]
