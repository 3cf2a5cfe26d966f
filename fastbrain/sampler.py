"""How the next token is chosen from its logits, with the crate's own random draws."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from torch import Tensor

from fastbrain.errors import InvalidConfig
from fastbrain.stdrng import F32, StdRng


@dataclass
class Sampler:
    """How the next token is chosen from its logits. Build one with `greedy` or `temperature`.

    A sampler goes on with its stream of draws from one use to the next; one that is chained from
    it starts anew.

    The filters apply in a fixed order whatever the order they were chained in: repetition
    penalty, top-k, temperature, top-p. One FP32 number is drawn per token, none when greedy.
    """

    _temperature: float
    _seed: int | None = None
    _top_k: int = 0
    _top_p: float = 1.0
    _penalty: float = 1.0

    def __post_init__(self) -> None:
        self._rng = StdRng(secrets.randbits(64) if self._seed is None else self._seed)

    @classmethod
    def greedy(cls) -> Self:
        """Always the highest logit; the lowest id wins a tie."""
        return cls(0.0)

    @classmethod
    def temperature(cls, temperature: float, seed: int | None = None) -> Self:
        """Draws in proportion to exp(logit / temperature).

        Args:
            temperature: below 1 sharpens, above 1 flattens; 0 or less is greedy.
            seed: of the draws, in [0, 2**64); a new one from the system when None.
        """
        if not np.isfinite(temperature):
            raise InvalidConfig(f"temperature must be a finite number, got {temperature}")
        return cls(temperature, seed)

    def top_k(self, k: int) -> Self:
        """Only the k highest logits stand; 0 keeps all."""
        if not isinstance(k, int) or k < 0:
            raise InvalidConfig(f"top_k must be at least 0, which keeps all, got {k}")
        return replace(self, _top_k=k)

    def top_p(self, p: float) -> Self:
        """Only the likeliest tokens that together reach probability p stand; 1 keeps all."""
        if not 0 <= p <= 1:
            raise InvalidConfig(
                f"top_p must be from 0, which keeps the likeliest token alone, to 1, got {p}"
            )
        return replace(self, _top_p=p)

    def repetition_penalty(self, penalty: float) -> Self:
        """Each earlier occurrence divides a positive logit by `penalty`, and multiplies others."""
        if not (np.isfinite(penalty) and penalty > 0):
            raise InvalidConfig(f"repetition_penalty must be above 0, got {penalty}; 1 is none")
        return replace(self, _penalty=penalty)

    def pick(self, logits: Tensor | F32 | Sequence[float], history: Sequence[int]) -> int:
        """The next token.

        Args:
            logits: (V), any float dtype; used in FP32.
            history: the ids so far, prompt included, which the repetition penalty looks at.
        """
        if isinstance(logits, Tensor):
            logits = logits.detach().float().cpu().numpy()
        scores = np.array(logits, dtype=np.float32)
        if scores.size == 0:
            raise InvalidConfig("logits must have at least one entry, got none")
        if self._penalty != 1.0:
            _penalize(scores, history, np.float32(self._penalty))
        if self._temperature <= 0:
            return int(scores.argmax())
        return self._draw(scores)

    def _draw(self, scores: F32) -> int:
        # NaN ranks highest, as the crate's total order has it
        rank = np.where(np.isnan(scores), np.float32(np.inf), scores)
        order = np.argsort(-rank, kind="stable")
        if 0 < self._top_k < len(order):
            order = order[: self._top_k]
        kept = scores[order]
        with np.errstate(all="ignore"):
            weights = np.exp((kept - kept[0]) / np.float32(self._temperature))
            if self._top_p < 1:
                running = weights.cumsum(dtype=np.float32)
                reached = running / running[-1] >= np.float32(self._top_p)
                weights = weights[: int(reached.argmax()) + 1 if reached.any() else None]
            # cumsum adds one by one, as the crate does; sum would pair
            total = weights.cumsum(dtype=np.float32)[-1]
            if not (np.isfinite(total) and total > 0):
                return int(order[0])
            draw = self._rng.uniform(1, 0.0, float(total))
            left = np.subtract.accumulate(np.concatenate([draw, weights]), dtype=np.float32)[1:]
        spent = np.flatnonzero(left <= 0)
        return int(order[spent[0] if len(spent) else 0])


def _penalize(scores: F32, history: Sequence[int], penalty: np.float32) -> None:
    ids, counts = np.unique(np.asarray(history, dtype=np.int64), return_counts=True)
    inside = (ids >= 0) & (ids < len(scores))
    ids, counts = ids[inside], counts[inside]
    for repeat in range(int(counts.max(initial=0))):
        again = ids[counts > repeat]
        old = scores[again]
        scores[again] = np.where(old > 0, old / penalty, old * penalty)
