"""Every block size and warp count in the package, by card family.

Chosen with the report (`python -m fastbrain.kernels.report`); docs/kernels.md shows what lost.
Every function takes the family first, "sm_80", "sm_86", "sm_89" or "sm_90", and returns the options
of one launch.
"""

from typing import Any

Tile = dict[str, Any]


def swiglu(family: str, F: int) -> Tile:
    """Rows by columns: 8 elements a thread make 128-bit accesses of BF16, and two of FP32."""
    width = min(_power_of_2(F), 1024)
    return {"ROWS": 1024 // width, "BLOCK_F": width, "num_warps": 4, "num_stages": 1}


def adam_step(family: str) -> Tile:
    """4 elements a thread: 128-bit accesses of FP32, and what one tensor holds fits registers."""
    # with 4 the compiler spills two registers for an SM of 64 warps
    return {"BLOCK": 2048 if family == "sm_80" else 1024, "num_warps": 8, "num_stages": 1}


def grad_norm(family: str) -> Tile:
    """Elements of one partial sum."""
    return {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}


def grad_norm_sum(family: str) -> Tile:
    """Partial sums that the one adding program takes at a time."""
    return {"BLOCK": 2048, "num_warps": 8, "num_stages": 1}


def masked_cross_entropy(family: str) -> Tile:
    """A program per row of logits, BLOCK columns at a time: 8 elements a thread."""
    return {"BLOCK": 2048, "num_warps": 8}


def linear_cross_entropy(family: str) -> Tile:
    """As `masked_cross_entropy`."""
    return {"BLOCK": 2048, "num_warps": 8}


def pack_rows(family: str) -> Tile:
    """One program numbers the rows that count, BLOCK of them at a time."""
    return {"BLOCK": 4096, "num_warps": 8}


def gather_rows(family: str) -> Tile:
    """Copies rows, BLOCK columns a program."""
    return {"BLOCK": 1024, "num_warps": 4}


# programs that share the rows of a sum over rows: four to a multiprocessor
_PROGRAMS = {"sm_80": 432, "sm_86": 112, "sm_89": 512, "sm_90": 528}


def rms_norm_fwd(family: str, D: int) -> Tile:
    """Whole rows: 8 elements a thread make 128-bit accesses of BF16, 16 keep wide ones resident."""
    return _rows(D)


def rms_norm_bwd(family: str, D: int) -> Tile:
    """As `rms_norm_fwd`."""
    return {"PROGRAMS": _PROGRAMS[family], **_rows(D)}


def rms_norm_sum(family: str) -> Tile:
    """Partial rows at a time by columns."""
    return {"BLOCK_ROWS": 32, "BLOCK_D": 32, "num_warps": 4, "num_stages": 1}


def rotary(family: str, half: int) -> Tile:
    """Rows of half a head: 8 elements a thread make 128-bit accesses of BF16."""
    width = _power_of_2(half)
    return {"ROWS": max(1, 1024 // width), "BLOCK_K": width, "num_warps": 4, "num_stages": 1}


def _rows(D: int) -> Tile:
    width = _power_of_2(D)
    warps = min(max(width // 256, 4), 16)
    return {"ROWS": max(1, 1024 // width), "BLOCK_D": width, "num_warps": warps, "num_stages": 1}


def _power_of_2(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def attention_fwd(family: str, K: int, itemsize: int) -> Tile:
    """Query rows by key rows of one product, for a head width and a dtype's bytes."""
    return _attention(_ATTENTION_FWD, family, K, itemsize)


def attention_bwd_dq(family: str, K: int, itemsize: int) -> Tile:
    """Query rows by key rows, as `attention_fwd`."""
    return _attention(_ATTENTION_BWD_DQ, family, K, itemsize)


def attention_bwd_dkv(family: str, K: int, itemsize: int) -> Tile:
    """Query rows by key rows, as `attention_fwd`."""
    return _attention(_ATTENTION_BWD_DKV, family, K, itemsize)


HEAD_WIDTHS = (16, 32, 64, 96, 128)  # that the attention kernels are made for

# bytes of an element, head width: query rows, key rows, warps, stages
_Attention = dict[tuple[int, int], tuple[int, int, int, int]]
_ATTENTION_FWD: dict[str, _Attention] = {
    # with two stages the compiler spills for an SM of 64 warps
    "sm_80": {(4, 64): (32, 16, 4, 3)},
    "sm_86": {
        (2, 16): (64, 64, 4, 2),
        (2, 32): (64, 32, 4, 2),
        (2, 64): (64, 32, 4, 2),
        (2, 96): (128, 32, 8, 2),
        (2, 128): (128, 32, 8, 2),
        (4, 16): (32, 32, 4, 2),
        (4, 32): (32, 32, 4, 2),
        (4, 64): (32, 16, 4, 2),
        (4, 96): (16, 16, 8, 2),
        (4, 128): (32, 16, 8, 2),
    },
    "sm_90": {
        (2, 16): (128, 128, 8, 3),
        (2, 32): (128, 128, 8, 3),
        (2, 64): (128, 128, 8, 3),
        (2, 96): (128, 64, 8, 3),
        (2, 128): (128, 64, 8, 3),
    },
}
_ATTENTION_BWD_DQ: dict[str, _Attention] = {
    "sm_86": {
        (2, 16): (64, 64, 4, 2),
        (2, 32): (64, 64, 4, 2),
        (2, 64): (64, 32, 4, 2),
        (2, 96): (32, 32, 4, 2),
        (2, 128): (32, 32, 4, 2),
        (4, 16): (32, 32, 4, 2),
        (4, 32): (32, 16, 4, 2),
        (4, 64): (32, 16, 4, 2),
        (4, 96): (32, 16, 8, 2),
        (4, 128): (32, 16, 8, 2),
    },
    "sm_90": {
        (2, 16): (64, 64, 4, 2),
        (2, 32): (64, 64, 4, 2),
        (2, 64): (64, 64, 4, 2),
        (2, 96): (128, 64, 8, 2),
        (2, 128): (128, 64, 8, 2),
    },
}
_ATTENTION_BWD_DKV: dict[str, _Attention] = {
    "sm_80": {(4, 32): (16, 32, 4, 3), (4, 128): (16, 32, 8, 3)},
    "sm_86": {
        (2, 16): (64, 64, 4, 2),
        (2, 32): (32, 64, 4, 3),
        (2, 64): (32, 64, 4, 2),
        (2, 96): (64, 64, 8, 2),
        (2, 128): (64, 64, 8, 2),
        (4, 16): (32, 32, 4, 2),
        (4, 32): (16, 32, 4, 2),
        (4, 64): (16, 32, 4, 1),
        (4, 96): (16, 32, 8, 3),
        (4, 128): (16, 32, 8, 2),
    },
    "sm_90": {
        (2, 16): (64, 64, 4, 2),
        (2, 32): (64, 64, 4, 2),
        (2, 64): (64, 128, 8, 2),
        (2, 96): (32, 128, 8, 1),
        (2, 128): (32, 128, 8, 1),
    },
}


def _attention(rows: dict[str, _Attention], family: str, K: int, itemsize: int) -> Tile:
    home = rows["sm_86"]
    row = itemsize, int(K)  # under torch.compile K may be a symbol
    i, j, warps, stages = rows.get(family, home).get(row, home[row])
    return {"BLOCK_I": i, "BLOCK_J": j, "num_warps": warps, "num_stages": stages}


def routing_count(family: str) -> Tile:
    """Slots of a block, which `routing_place` shares, by experts counted at a time."""
    return {"BLOCK": 128, "BLOCK_E": 16, "num_warps": 4}


def routing_scan(family: str) -> Tile:
    """Counts added up at a time by the one program."""
    return {"BLOCK": 1024, "num_warps": 4}


def routing_place(family: str) -> Tile:
    """Slots of a block by peers they are compared with at a time."""
    return {"BLOCK": 128, "BLOCK_PEERS": 8, "num_warps": 4}


def routing_map(family: str, E: int, itemsize: int) -> Tile:
    """Tiles, of BLOCK_M rows, that a program describes, by all experts and the rows past them."""
    rows, groups = _group_rows(family, itemsize), _power_of_2(E + 1)
    block = max(1, min(32, 8192 // groups))
    return {"BLOCK_M": rows, "BLOCK": block, "BLOCK_E": groups, "num_warps": 4}


def expert_hidden(family: str, itemsize: int) -> Tile:
    """Rows by hidden columns, each with two sums, by the depth of one product."""
    return _group(_EXPERT_HIDDEN, "BLOCK_F", family, itemsize)


def expert_hidden_grad(family: str, itemsize: int) -> Tile:
    """Rows by hidden columns by the depth of one product."""
    return _group(_EXPERT_HIDDEN_GRAD, "BLOCK_F", family, itemsize)


def group_rows(family: str, itemsize: int) -> Tile:
    """Rows by output columns by the depth of one product."""
    return _group(_GROUP_ROWS, "BLOCK_C", family, itemsize)


def group_weights(family: str, itemsize: int, gathers: bool) -> Tile:
    """Output columns by input columns of a weight by rows of one product."""
    home = _GROUP_WEIGHTS["sm_86", itemsize]
    c, d, m, warps, stages = _GROUP_WEIGHTS.get((family, itemsize), home)
    if not gathers and family != "sm_90" and itemsize == 2:
        # with Triton 3.9 the larger tile leaves room for one CTA
        c, d, m, warps, stages = 64, 128, 32, 4, 2
    return {"BLOCK_C": c, "BLOCK_D": d, "BLOCK_M": m, "num_warps": warps, "num_stages": stages}


def gates_grad(family: str) -> Tile:
    """Slots of a program."""
    return {"BLOCK": 128, "num_warps": 4}


def sum_by_token(family: str, D: int, itemsize: int) -> Tile:
    """Columns of one token's row: 16 bytes or more a thread."""
    block = min(1024, max(256, _power_of_2(D)))
    return {"BLOCK": block, "num_warps": min(4, block * itemsize // 512)}


# family, bytes of an element: columns, depth, warps, stages
_Group = dict[tuple[str, int], tuple[int, int, int, int]]
_EXPERT_HIDDEN: _Group = {
    ("sm_86", 2): (64, 32, 4, 3),
    ("sm_86", 4): (32, 16, 4, 2),
    ("sm_90", 2): (64, 64, 8, 3),
}
_EXPERT_HIDDEN_GRAD: _Group = {
    ("sm_86", 2): (64, 32, 4, 2),
    ("sm_86", 4): (32, 16, 4, 2),
    ("sm_90", 2): (128, 64, 8, 3),
}
_GROUP_ROWS: _Group = {
    ("sm_86", 2): (128, 32, 4, 3),
    ("sm_86", 4): (64, 16, 4, 3),
    ("sm_90", 2): (128, 64, 8, 3),
}
_GROUP_WEIGHTS: dict[tuple[str, int], tuple[int, int, int, int, int]] = {
    ("sm_86", 2): (128, 128, 32, 8, 2),
    ("sm_86", 4): (64, 64, 16, 4, 2),
    ("sm_90", 2): (128, 128, 64, 8, 3),
}


def _group(rows: _Group, columns: str, family: str, itemsize: int) -> Tile:
    n, d, warps, stages = rows.get((family, itemsize), rows["sm_86", itemsize])
    block = {"BLOCK_M": _group_rows(family, itemsize), columns: n, "BLOCK_D": d}
    return block | {"num_warps": warps, "num_stages": stages}


def _group_rows(family: str, itemsize: int) -> int:
    """Rows of a tile of every product of grouped rows, which share one map."""
    return 128 if (family, itemsize) == ("sm_90", 2) else 64
