"""Whether transformers computes with an exported directory what we compute with the model."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fastbrain.lm import TransformerLm
from fastbrain.sampler import Sampler

# of the largest logit; in FP32 the two differ by some 5e-7 of it
MOST = 1e-4
# nats a token that rounding the weights may cost; it is some 3e-4
MOST_LOSS = 0.1

_ROWS, _POSITIONS, _GREEDY = 4, 64, 10


class Checked(NamedTuple):
    """How far transformers is from us.

    Attributes:
        difference: the largest one of logits, as a part of their scale.
        greedy_equal: whether the likeliest tokens are the same, but for ties that arithmetic
            decides.
        loss_change: what rounding to BF16 did to the loss, nats a token; None in FP32.
        version: of transformers.
    """

    difference: float
    greedy_equal: bool
    loss_change: float | None
    version: str

    @property
    def agrees(self) -> bool:
        """Whether all of it is no more than arithmetic explains."""
        lost = 0.0 if self.loss_change is None else abs(self.loss_change)
        return self.difference <= MOST and self.greedy_equal and lost <= MOST_LOSS

    def document(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "difference": self.difference,
            "greedy_equal": self.greedy_equal,
            "loss_change": self.loss_change,
            "agrees": self.agrees,
            "transformers": self.version,
        }

    def words(self) -> str:
        """In a line."""
        same = "agree" if self.greedy_equal else "differ"
        found = (
            f"in transformers {self.version}, logits differ by {self.difference:.1e} of their "
            f"scale, {_GREEDY} greedy tokens {same}"
        )
        if self.loss_change is not None:
            found += f", BF16 moves the loss by {self.loss_change:+.1e}"
        if not self.agrees:
            found += f"; do not use it: at most {MOST} is arithmetic, and tokens must agree"
        return found


def check(directory: Path, model: TransformerLm, dtype: str) -> Checked:
    """Load a directory with transformers, in FP32 on the CPU, and compare it with the model.

    Logits of random ids are compared, and greedy tokens. Rounding to BF16 may turn the choice of
    an expert, and that moves logits far, so a directory in BF16 is compared with the rounded
    model; what the rounding itself did is told by the loss of texts that the model draws.

    Args:
        model: what was exported, on the CPU. It is rounded in place if `dtype` is bfloat16.
        dtype: of the directory.
    """
    config = model.config
    change = None
    if dtype == "bfloat16" and config.max_seq_len > 1:
        texts = _drawn(model)
        before = _loss(_ours(model, texts), texts)
        for _, view in model.weights():
            view.copy_(view.to(torch.bfloat16))
        change = _loss(_ours(model, texts), texts) - before
    transformers: Any = importlib.import_module("transformers")
    other = _loaded(transformers, directory)
    ids = _random_ids(model)
    ours, theirs = _ours(model, ids), _theirs(other, ids)
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
    new = min(_GREEDY, config.max_seq_len - 1)
    prompt = ids[0, : max(1, min(8, config.max_seq_len - new))].tolist()
    wanted = model.generate(prompt, new, Sampler.greedy())
    equal = chooses(_theirs(other, torch.tensor([prompt + wanted[:-1]]))[0], wanted)
    return Checked(difference, equal, change, str(transformers.__version__))


def _loaded(transformers: Any, directory: Path) -> Any:
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return loaded.eval()


def _random_ids(model: TransformerLm) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, min(_POSITIONS, model.config.max_seq_len))
    return torch.randint(0, model.config.vocab_size, shape, generator=generator)


def _drawn(model: TransformerLm) -> Tensor:
    starts = _random_ids(model)[:, :1].tolist()
    count = min(_POSITIONS, model.config.max_seq_len) - 1
    drawn = model.generate_batch(starts, count, Sampler.temperature(1.0, seed=0))
    return torch.tensor([a + b for a, b in zip(starts, drawn, strict=True)])


@torch.no_grad()
def _theirs(other: Any, ids: Tensor) -> Tensor:
    logits: Tensor = other(ids).logits
    return logits.double()


@torch.no_grad()
def _ours(model: TransformerLm, ids: Tensor) -> Tensor:
    logits: Tensor = model.module(ids)
    return logits.double()


def _loss(logits: Tensor, ids: Tensor) -> float:
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def chooses(logits: Tensor, wanted: list[int]) -> bool:
    """Whether the last rows of logits (S, V) are each largest at the id wanted, or nearly so."""
    rows = logits[len(logits) - len(wanted) :]
    chosen = rows[torch.arange(len(wanted)), wanted]
    return bool((rows.amax(1) - chosen <= MOST * logits.abs().max()).all())
