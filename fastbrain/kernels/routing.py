"""Routing tables: which rows of the experts' matrices belong to which choice of which token.

A slot is one choice of one token, t k + j; a row is its place among the rows sorted by expert.

    row(slot) = slots of lower experts + earlier slots of the same expert

Every program counts the experts of one block of slots; one program turns the counts, laid out
expert by expert, into their running sum, whose value at (expert, block) is the first row of that
block's slots there; and every block then places its slots in order. No atomics, no sort and no word
to the host: equal ids give equal tables, bit for bit, and the order of rows is that of the slots.

Shapes: N tokens, k choices, E experts. Ids outside [0, E) have no row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.launch import family_of, launch


class Routing(NamedTuple):
    """Where every slot went, as int32 tensors.

    Attributes:
        rows: (N, k), the row of a slot, -1 for a slot without one.
        slots: (N * k), the slot of a row; rows from offsets[E] on are not written.
        offsets: (E + 1), the first row of every expert, then the number of rows.
        tiles: (3, T), see `map_tiles`.
        order: (E), likewise.
    """

    rows: Tensor
    slots: Tensor
    offsets: Tensor
    tiles: Tensor
    order: Tensor


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _count_kernel(
    ids_ptr, counts_ptr, num_slots, num_blocks, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        count = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + e * num_blocks + block, count, mask=e < E)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(counts_ptr, offsets_ptr, num_blocks, E, BLOCK: tl.constexpr):
    """Replaces counts (E, blocks) by the sum of all before them."""
    length = E * num_blocks
    before = 0
    for first in range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < length
        count = tl.load(counts_ptr + i, mask=inside, other=0)
        base = before + tl.cumsum(count, 0) - count
        tl.store(counts_ptr + i, base, mask=inside)
        tl.store(offsets_ptr + i // num_blocks, base, mask=inside & (i % num_blocks == 0))
        before += tl.sum(count, 0)
    tl.store(offsets_ptr + E, before)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _place_kernel(
    ids_ptr,
    bases_ptr,
    rows_ptr,
    slots_ptr,
    num_slots,
    num_blocks,
    E,
    BLOCK: tl.constexpr,
    BLOCK_PEERS: tl.constexpr,
):
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    slot = block * BLOCK + i
    ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, BLOCK_PEERS):
        j = first + tl.arange(0, BLOCK_PEERS)
        peer = block * BLOCK + j
        peers = tl.load(ids_ptr + peer, mask=peer < num_slots, other=-1)
        earlier = (peers[:, None] == ids[None, :]) & (j[:, None] < i[None, :])
        rank += tl.sum(earlier.to(tl.int32), 0)
    routed = (ids >= 0) & (ids < E)
    base = tl.load(bases_ptr + ids * num_blocks + block, mask=routed, other=0)
    row = tl.where(routed, base + rank, -1)
    tl.store(rows_ptr + slot, row, mask=slot < num_slots)
    tl.store(slots_ptr + row, slot, mask=routed)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _map_kernel(
    offsets_ptr,
    tiles_ptr,
    order_ptr,
    num_rows,
    num_tiles,
    E,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_E)
    # group E holds the rows past the last expert
    first = tl.minimum(tl.load(offsets_ptr + e, mask=e <= E, other=0), num_rows)
    last = tl.minimum(tl.load(offsets_ptr + e + 1, mask=e < E, other=num_rows), num_rows)
    tiles = tl.where(e <= E, tl.cdiv(last - first, BLOCK_M), 0)
    passed = tl.cumsum(tiles, 0)[None, :] <= i[:, None]
    expert = tl.sum(passed.to(tl.int32), 1)
    earlier = tl.sum(tl.where(passed, tiles[None, :], 0), 1)
    used = expert <= E
    end = tl.minimum(tl.load(offsets_ptr + expert + 1, mask=expert < E, other=num_rows), num_rows)
    row = tl.load(offsets_ptr + expert, mask=used, other=0) + (i - earlier) * BLOCK_M
    inside = i < num_tiles
    tl.store(tiles_ptr + i, tl.where(used, expert, -1), mask=inside)
    tl.store(tiles_ptr + num_tiles + i, row, mask=inside)
    tl.store(tiles_ptr + 2 * num_tiles + i, end, mask=inside)
    # i now stands for an expert, of which there are no more than tiles
    start = tl.load(offsets_ptr + i, mask=i < E, other=0)
    rows = tl.minimum(tl.load(offsets_ptr + i + 1, mask=i < E, other=0), num_rows) - start
    size, others = rows[:, None], (last - first)[None, :]
    before = (others > size) | ((others == size) & (e[None, :] < i[:, None]))
    rank = tl.sum((before & (e[None, :] < E)).to(tl.int32), 1)
    tl.store(order_ptr + rank, i, mask=i < E)


@triton.jit
def load_tile(tiles_ptr, num_tiles, tile):
    """Group, first row and rows left of a tile: with none left, there is nothing to do."""
    e = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    return e, first.to(tl.int64), tl.where(e < 0, 0, end - first)


def route(expert_ids: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
    """The tables for products of rows of this dtype, whose tiles they suit."""
    N, k = expert_ids.shape
    family = family_of(expert_ids)
    count = tiles.routing_count(family)
    num_slots, num_blocks = N * k, max(triton.cdiv(N * k, count["BLOCK"]), 1)
    rows, slots, counts, offsets = (
        expert_ids.new_empty(shape, dtype=torch.int32)
        for shape in ((N, k), (num_slots,), (num_experts, num_blocks), (num_experts + 1,))
    )
    sizes = num_slots, num_blocks, num_experts
    launch(_count_kernel, (num_blocks,), expert_ids, counts, *sizes, **count)
    launch(
        _scan_kernel, (1,), counts, offsets, num_blocks, num_experts, **tiles.routing_scan(family)
    )
    place = tiles.routing_place(family)
    launch(_place_kernel, (num_blocks,), expert_ids, counts, rows, slots, *sizes, **place)
    return Routing(rows, slots, offsets, *map_tiles(offsets, num_slots, dtype))


def map_tiles(offsets: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which rows every program of a grouped product takes, and experts from most rows to least.

    A tile is (expert, first row, end of its expert). Their number is a bound known without the
    counts; the surplus has expert -1. Rows past the last expert are expert E.
    """
    num_experts = offsets.shape[0] - 1
    tile = tiles.routing_map(family_of(offsets), num_experts, dtype.itemsize)
    num_tiles = triton.cdiv(num_rows, tile["BLOCK_M"]) + num_experts
    out, order = offsets.new_empty(3, num_tiles), offsets.new_empty(num_experts)
    grid = (triton.cdiv(num_tiles, tile["BLOCK"]),)
    launch(_map_kernel, grid, offsets, out, order, num_rows, num_tiles, num_experts, **tile)
    return out, order
