"""Sampling and decoding with a key-value cache, for one prompt or several of unequal length.

A token's slot in the cache is its position, so a shorter prompt is padded on the right: what
padding leaves behind is never visible and is overwritten by the tokens that come after.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbrain.errors import EmptyDataset, InvalidConfig, SequenceTooLong, TokenOutOfRange
from fastbrain.kernels import causal_attention
from fastbrain.layers import Attend
from fastbrain.stdrng import F32, StdRng
from fastbrain.transformer import Transformer


@dataclass
class Sampler:
    """How the next token is chosen from its logits. Build one with `greedy` or `temperature`.

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
        if k < 0:
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


class Cache:
    """The keys and values of B sequences in every layer, growing as they do."""

    def __init__(self, module: Transformer, batch: int) -> None:
        self._module = module
        self.lengths = [0] * batch
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * module.config.n_layers

    @torch.no_grad()
    def feed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Appends ids to each sequence, and returns the logits (B, V) after its last one.

        A row may be empty while another is not; its logits mean nothing.

        Raises:
            EmptyDataset: every row is empty.
            TokenOutOfRange: an id outside the vocabulary.
            SequenceTooLong: a sequence would exceed `max_seq_len`.
        """
        config = self._module.config
        check_ids(rows, config.vocab_size)
        width = max((len(row) for row in rows), default=0)
        if width == 0:
            raise EmptyDataset("there are no ids to feed; give at least one")
        for row, length in zip(rows, self.lengths, strict=True):
            if length + len(row) > config.max_seq_len:
                raise SequenceTooLong(length + len(row), config.max_seq_len)
        device = self._module.embedding.weight.device
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        starts = torch.tensor(self.lengths, device=device)
        counts = torch.tensor([len(row) for row in rows], device=device)
        steps = torch.arange(width, device=device)
        padded = len({len(row) for row in rows}) > 1
        valid = steps < counts[:, None] if padded else None
        positions = (starts[:, None] + steps).clamp(max=config.max_seq_len - 1)
        attends = [self._attend(i, positions, valid) for i in range(config.n_layers)]
        hidden, _ = self._module.trunk(ids, attends, positions, valid)
        self.lengths = [n + len(row) for n, row in zip(self.lengths, rows, strict=True)]
        last = (counts - 1).clamp(min=0)
        return self._module.logits(hidden[torch.arange(len(rows), device=device), last])

    def _attend(self, layer: int, positions: Tensor, valid: Tensor | None) -> Attend:
        first = not any(self.lengths)
        end = max(self.lengths) + positions.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._store(layer, k, v, positions, valid, end)
            if first:
                return causal_attention(q, k, v)
            visible = torch.arange(keys.shape[1], device=q.device) <= positions[:, :, None]
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=visible[:, None],
                enable_gqa=True,
            )
            return out.transpose(1, 2)

        return attend

    def _store(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        end: int,
    ) -> tuple[Tensor, Tensor]:
        end = min(end, self._module.config.max_seq_len)
        cached = self._layers[layer]
        if cached is None or cached[0].shape[1] < end:
            # doubled, so that n tokens cost O(n) copying
            capacity = min(max(2 * end, 64), self._module.config.max_seq_len)
            grown = k.new_zeros(2, k.shape[0], capacity, *k.shape[2:])
            if cached is not None:
                for new, old in zip(grown, cached, strict=True):
                    new[:, : old.shape[1]] = old
            cached = self._layers[layer] = (grown[0], grown[1])
        row = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(positions)
        where = (row, positions) if valid is None else (row[valid], positions[valid])
        for store, fresh in zip(cached, (k, v), strict=True):
            store[where] = fresh if valid is None else fresh[valid]
        return cached[0][:, :end], cached[1][:, :end]


class Decoder:
    """One sequence, fed and extended piece by piece."""

    def __init__(self, module: Transformer) -> None:
        self._cache = Cache(module, 1)
        self._history: list[int] = []
        self._logits: Tensor | None = None
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> None:
        """Appends ids to the sequence, after a sampled token that is still to be run."""
        ids = [int(i) for i in ids]
        waiting = [*self._pending, *ids]
        if waiting:
            self._logits = self._cache.feed([waiting])[0]
            self._pending = []
        self._history += ids

    def next(self, sampler: Sampler) -> int:
        """Samples one token and appends it.

        Raises:
            InvalidConfig: nothing has been fed yet.
            SequenceTooLong: the sequence already fills `max_seq_len`.
        """
        self.feed([])
        if self._logits is None:
            raise InvalidConfig("next needs at least one token to follow; feed the prompt first")
        token = sampler.pick(self._logits, self._history)
        # its own forward waits until another token is wanted: the last one needs none
        self._pending = [token]
        self._history.append(token)
        return token

    def history(self) -> list[int]:
        """The ids so far, fed and sampled."""
        return list(self._history)


def generate_with(
    module: Transformer,
    prompt: Sequence[int],
    n: int,
    sampler: Sampler,
    callback: Callable[[int], bool],
) -> list[int]:
    """Up to n new ids; `callback` sees each, and stops with False after it."""
    check_room([prompt], n, module.config.max_seq_len)
    decoder = Decoder(module)
    decoder.feed(prompt)
    found: list[int] = []
    while len(found) < n:
        found.append(decoder.next(sampler))
        if not callback(found[-1]):
            break
    return found


def generate_batch(
    module: Transformer,
    prompts: Sequence[Sequence[int]],
    n: int,
    sampler: Sampler,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Up to n new ids for every prompt; the sampler draws for them in order."""
    starts = [[int(i) for i in prompt] for prompt in prompts]
    check_room(starts, n, module.config.max_seq_len)
    found: list[list[int]] = [[] for _ in starts]
    if not starts:
        return found
    cache = Cache(module, len(starts))
    live = set(range(len(starts)))
    logits = cache.feed(starts)
    for left in range(n, 0, -1):
        host = logits.float().cpu().numpy()
        rows: list[list[int]] = [[] for _ in starts]
        for i in sorted(live):
            token = sampler.pick(host[i], starts[i] + found[i])
            found[i].append(token)
            rows[i] = [token]
            if token in stop:
                live.discard(i)
                rows[i] = []
        if not live or left == 1:
            break
        logits = cache.feed(rows)
    return found


def check_room(prompts: Sequence[Sequence[int]], n: int, max_seq_len: int) -> None:
    """Refuses an empty prompt, a negative n, and more tokens than the model has positions."""
    if n < 0:
        raise InvalidConfig(f"the number of new tokens must be at least 0, got {n}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InvalidConfig(f"prompt {i} is empty; give at least one token to continue from")
        # the last token is sampled but never read
        length = len(prompt) + max(n - 1, 0)
        if length > max_seq_len:
            raise SequenceTooLong(length, max_seq_len)


def check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises TokenOutOfRange for an id outside [0, vocab_size)."""
    for row in rows:
        for id in row:
            if not 0 <= id < vocab_size:
                raise TokenOutOfRange(id, vocab_size)
