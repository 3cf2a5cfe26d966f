"""Decoding with a key-value cache, for one prompt or several of unequal length.

A token's slot in the cache is its position, so a shorter prompt is padded on the right: what
padding leaves behind is never visible and is overwritten by the tokens that come after.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbrain.errors import EmptyDataset, InvalidConfig, SequenceTooLong, TokenOutOfRange
from fastbrain.kernels import causal_attention
from fastbrain.layers import Attend
from fastbrain.sampler import Sampler
from fastbrain.tokens.ids import Ids, integers
from fastbrain.transformer import Transformer

Stop = int | Ids


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

    def feed(self, ids: Ids) -> None:
        """Appends ids to the sequence, after a sampled token that is still to be run."""
        fed = prompt_ids(ids, "ids")
        waiting = [*self._pending, *fed]
        if waiting:
            self._logits = self._cache.feed([waiting])[0]
            self._pending = []
        self._history += fed

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
    prompt: Ids,
    n: int,
    sampler: Sampler,
    callback: Callable[[int], bool],
) -> list[int]:
    """Up to n new ids; `callback` sees each, and stops with False after it."""
    start = prompt_ids(prompt, "prompt")
    check_room([start], n, module.config.max_seq_len)
    decoder = Decoder(module)
    decoder.feed(start)
    found: list[int] = []
    while len(found) < n:
        found.append(decoder.next(sampler))
        if not callback(found[-1]):
            break
    return found


def generate_batch(
    module: Transformer,
    prompts: Sequence[Ids],
    n: int,
    sampler: Sampler,
    stop: Stop = (),
) -> list[list[int]]:
    """Up to n new ids for every prompt; the sampler draws for them in order."""
    ends = stop_ids(stop)
    starts = [prompt_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
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
            if token in ends:
                live.discard(i)
                rows[i] = []
        if not live or left == 1:
            break
        logits = cache.feed(rows)
    return found


def check_room(prompts: Sequence[Sequence[int]], n: int, max_seq_len: int) -> None:
    """Refuses an empty prompt, a negative n, and more tokens than the model has positions."""
    if not isinstance(n, int) or isinstance(n, bool):
        raise InvalidConfig(f"the number of new tokens must be a whole number, got {n!r}")
    if n < 0:
        raise InvalidConfig(f"the number of new tokens must be at least 0, got {n}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InvalidConfig(f"prompt {i} is empty; give at least one token to continue from")
        # the last token is sampled but never read
        length = len(prompt) + max(n - 1, 0)
        if length > max_seq_len:
            raise SequenceTooLong(length, max_seq_len)


def prompt_ids(ids: Ids, what: str) -> list[int]:
    """Ids as a list; InvalidConfig for what is not one row of integers."""
    found: list[int] = integers(ids, what, InvalidConfig).tolist()
    return found


def stop_ids(stop: Stop) -> frozenset[int]:
    """One id or several, as a set; InvalidConfig for what is no id."""
    return frozenset(prompt_ids([stop] if isinstance(stop, int) else stop, "stop"))


def check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises TokenOutOfRange for an id outside [0, vocab_size)."""
    for row in rows:
        for id in row:
            if not 0 <= id < vocab_size:
                raise TokenOutOfRange(id, vocab_size)
