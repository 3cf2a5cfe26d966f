"""The routing tables against a stable sort, and tile maps that cover every row once."""

import pytest
import torch

from fastbrain.kernels import tiles
from fastbrain.kernels.routing import map_tiles, route

ROWS = tiles.group_rows("sm_86", 4)["BLOCK_M"]


def sorted_slots(ids, E):
    """Slots with an expert, by expert and within it by position."""
    flat = ids.flatten()
    routed = ((flat >= 0) & (flat < E)).nonzero().squeeze(1)
    return routed[flat[routed].argsort(stable=True)]


def drawn(N, k, low, high):
    return torch.randint(low, high, (N, k))


ROUTES = {
    # a block is 128 slots
    "no-token": (drawn(0, 2, 0, 3), 3),
    "one-token": (drawn(1, 1, 2, 3), 3),
    "one-short-of-a-block": (drawn(127, 1, -1, 4), 3),
    "a-block": (drawn(64, 2, -1, 4), 3),
    "one-more": (drawn(129, 1, -1, 4), 3),
    # 256 experts in 9 blocks are more counts than are added up at a time
    "many-blocks-many-experts": (drawn(70, 16, -2, 258), 256),
    "one-expert-takes-all": (drawn(150, 2, 1, 2), 3),
    "all-skipped": (drawn(20, 2, 3, 5), 3),
    "one-expert": (drawn(40, 2, -1, 1), 1),
}


@pytest.fixture(params=ROUTES, ids=lambda name: f"fused-{name}")
def routed(request, device):
    """Ids, the number of experts, and their tables."""
    ids, E = ROUTES[request.param]
    ids = ids.to(device)
    return ids, E, route(ids, E, torch.float32)


def test_rows_are_slots_in_a_stable_order_of_expert(routed):
    ids, E, tables = routed
    expected = sorted_slots(ids, E)
    assert torch.equal(tables.slots[: len(expected)].long(), expected)
    rows = torch.full((ids.numel(),), -1, device=ids.device)
    rows[expected] = torch.arange(len(expected), device=ids.device)
    assert torch.equal(tables.rows.long(), rows.view_as(ids))


def test_offsets_bound_the_experts(routed):
    ids, E, tables = routed
    counts = ids[(ids >= 0) & (ids < E)].bincount(minlength=E)
    assert tables.offsets.dtype == torch.int32
    assert tables.offsets.tolist() == [0, *counts.cumsum(0).tolist()]


def covered(tiles):
    """(expert, row) of every row of every tile, in order."""
    owners, firsts, ends = tiles.tolist()
    return [
        (e, row)
        for e, first, end in zip(owners, firsts, ends, strict=True)
        if e >= 0
        for row in range(first, min(first + ROWS, end))
    ]


def every_row(offsets, num_rows):
    bounds = [*offsets.tolist(), num_rows]
    return [(e, row) for e in range(len(bounds) - 1) for row in range(bounds[e], bounds[e + 1])]


def test_tiles_cover_every_row_once_and_in_order(routed):
    ids, _, tables = routed
    assert covered(tables.tiles) == every_row(tables.offsets, ids.numel())


def test_experts_are_ordered_by_their_rows(routed):
    _, _, tables = routed
    expected = tables.offsets.diff().argsort(descending=True, stable=True)
    assert torch.equal(tables.order.long(), expected)


@pytest.mark.parametrize("left_over", [0, 1, ROWS], ids=lambda n: f"fused-{n}-left-over")
def test_groups_about_a_tile_are_covered_once(device, left_over):
    sizes = torch.tensor([0, 0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 0], device=device)
    bounds = torch.cat([sizes[:1], sizes.cumsum(0)]).int()
    num_rows = int(bounds[-1]) + left_over
    tiles, order = map_tiles(bounds, num_rows, torch.float32)
    assert covered(tiles) == every_row(bounds, num_rows)
    assert torch.equal(order.long(), sizes.argsort(descending=True, stable=True))


def test_fused_ids_of_either_width_may_hold_any_number(device):
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    wide = torch.tensor([[low, 2, high], [2**32, 0, 2**32 + 2]], device=device)
    narrow = torch.tensor([[-(2**31), 2, 2**31 - 1], [-1, 0, 3]], device=device).int()
    ours, theirs = (route(ids, 3, torch.float32) for ids in (wide, narrow))
    assert ours.rows.tolist() == theirs.rows.tolist() == [[-1, 1, -1], [-1, 0, -1]]
    assert ours.offsets.tolist() == theirs.offsets.tolist() == [0, 1, 1, 2]
