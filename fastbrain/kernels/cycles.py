"""The home card's clock: how long a kernel takes on an RTX 3060, from its machine code alone.

A model of one sub-core (one of the four schedulers of an SM) executes the instructions, control
codes included: the resident warps issue in order, one instruction a cycle, the last one first, then
the oldest; every pipe takes a new warp instruction each `interval` cycles, and a result is there
after `latency`. `makespan` then deals the CTAs of a launch, in their order, to the 28 SMs.

Rates are those of NVIDIA's GA102 white paper (256 FMA of BF16 with FP32 sums per SM and cycle on
GeForce: 32 cycles per HMMA.16816 and sub-core; 128 FP32, 64 INT32 and 16 special-function lanes per
SM; 128 bytes of shared memory per SM and cycle). Latencies are round figures from published
micro-benchmarks of Ampere. Nothing was fitted to the kernels it was checked on, which
docs/kernels.md lists.

Not modelled: barriers between the warps of a CTA, bank conflicts, the bandwidth of L2 and DRAM
(take the larger of this time and bytes / `BYTES_PER_S`), the instruction cache, changes of clock.
"""

import heapq
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fastbrain.kernels.machine_code import Instruction

CLOCK_HZ = 1.78e9
SMS = 28
SUB_CORES = 4
BYTES_PER_S = 330e9  # what streaming kernels reach of the nominal 360
TENSOR_FLOPS = 25.5e12

# how far apart the warps start, in cycles: times are the mean over these
_PHASES = (7, 101, 409)
_NEVER = 1 << 60


class Limits(NamedTuple):
    """What an SM has to give."""

    registers: int
    shared: int
    warps: int
    ctas: int

    @property
    def shared_per_cta(self) -> int:
        return self.shared - RESERVED


RESERVED = 1024  # bytes of shared memory that each CTA takes beyond its own
LIMITS = {
    "sm_80": Limits(65536, 167_936, 64, 32),
    "sm_86": Limits(65536, 102_400, 48, 16),
    "sm_89": Limits(65536, 102_400, 48, 24),
    "sm_90": Limits(65536, 233_472, 64, 32),
}


class Cost(NamedTuple):
    """What one warp instruction costs a sub-core.

    Attributes:
        pipe: where it executes.
        interval: cycles until the pipe takes the next warp instruction.
        latency: cycles until its result is there.
    """

    pipe: str
    interval: int
    latency: int


COSTS = {
    "hmma16816": Cost("tensor", 32, 34),
    "hmma16816half": Cost("tensor", 16, 18),
    "hmma1688": Cost("tensor", 16, 26),
    "hmma1688half": Cost("tensor", 8, 18),
    "hmma1688tf32": Cost("tensor", 32, 34),
    "hmma1684tf32": Cost("tensor", 16, 26),
    "fp32": Cost("fma", 1, 4),
    "imad": Cost("fmaheavy", 2, 4),
    "alu": Cost("alu", 2, 5),
    "special_function": Cost("xu", 8, 22),
    "shared32": Cost("mio", 4, 24),
    "shared64": Cost("mio", 8, 26),
    "shared128": Cost("mio", 16, 32),
    "matrix_load1": Cost("mio", 4, 26),
    "matrix_load2": Cost("mio", 8, 28),
    "matrix_load4": Cost("mio", 16, 34),
    "shuffle": Cost("mio", 4, 24),
    "load32": Cost("mio", 8, 240),
    "load64": Cost("mio", 16, 250),
    "load128": Cost("mio", 32, 270),
    "store": Cost("mio", 8, 20),
    "store128": Cost("mio", 32, 20),
    "barrier": Cost("control", 1, 24),
    "control": Cost("control", 1, 8),
    "copy_wait": Cost("control", 1, 2),
    "copy_commit": Cost("control", 1, 2),
    "uniform": Cost("uniform", 2, 10),
    "register": Cost("alu", 2, 12),
}

_PIPES = {cost.pipe for cost in COSTS.values()}

_KINDS = {
    "BAR": "barrier",
    "DEPBAR": "copy_wait",
    "LDGDEPBAR": "copy_commit",
    "SHFL": "shuffle",
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "FFMA32I", "FMUL32I"), "fp32"),
    **dict.fromkeys(("HFMA2", "HADD2", "HMUL2"), "fp32"),
    "IMAD": "imad",
    **dict.fromkeys(("MUFU", "F2I", "I2F", "F2F", "FRND"), "special_function"),
    **dict.fromkeys(("POPC", "FLO", "BREV"), "special_function"),
    **dict.fromkeys(("BRA", "EXIT", "BSSY", "BSYNC", "NOP", "WARPSYNC"), "control"),
    **dict.fromkeys(("CALL", "RET", "YIELD"), "control"),
    **dict.fromkeys(("S2R", "CS2R", "LDC"), "register"),
    **dict.fromkeys(("R2UR", "S2UR"), "uniform"),
}  # fmt: skip


def kind_of(name: str) -> str:
    """The entry of `COSTS` that a mnemonic with its modifiers, such as LDG.E.128, falls under."""
    base, *modifiers = name.split(".")
    if base == "HMMA":
        shape, result = modifiers[:2]
        return f"hmma{shape}" + (
            "tf32" if "TF32" in modifiers else "half" if result == "F16" else ""
        )
    width = "128" if "128" in modifiers else "64" if "64" in modifiers else "32"
    if base in ("LDS", "STS"):
        return f"shared{width}"
    if base == "LDSM":
        matrices = modifiers[-1]
        return "matrix_load" + (matrices if matrices in ("2", "4") else "1")
    if base in ("LDG", "LDGSTS", "LD", "LDL"):
        return f"load{width}"
    if base in ("STG", "ST", "STL", "RED", "ATOM", "ATOMG"):
        return "store128" if width == "128" else "store"
    return _KINDS.get(base) or ("uniform" if base.startswith("U") else "alu")


def trace(
    code: Sequence[Instruction],
    start: int,
    stop: int,
    taken: Collection[int] = (),
    trips: Mapping[int, int] | None = None,
) -> list[Instruction]:
    """The instructions executed from one address to another, both included.

    Args:
        code: of the whole kernel.
        start: address of the first.
        stop: address of the last.
        taken: addresses of the guarded forward branches that jump; the others fall through.
        trips: for the address of a loop's backward branch, how often its body runs; once unless
            given.
    """
    where = {instruction.address: n for n, instruction in enumerate(code)}
    left = {address: count - 1 for address, count in (trips or {}).items()}
    executed = []
    n = where[start]
    while code[n].address != stop:
        i = code[n]
        executed.append(i)
        n += 1
        if not i.name.startswith("BRA") or i.target is None:
            continue
        if i.target < i.address:
            if left.get(i.address, 0) > 0:
                left[i.address] -= 1
                n = where[i.target]
        elif i.address in taken or not i.predicate:
            n = where[i.target]
    return [*executed, code[n]]


def tensor_cycles(body: Iterable[Instruction]) -> int:
    """Cycles that one warp's tensor instructions in `body` keep the tensor pipe of its sub-core."""
    costs = (COSTS[kind_of(instruction.name)] for instruction in body)
    return sum(cost.interval for cost in costs if cost.pipe == "tensor")


class _Step(NamedTuple):
    """An instruction as `simulate` reads it."""

    pipe: str
    interval: int
    latency: int
    stall: int
    write: int
    read: int
    waits: tuple[int, ...]
    copies: bool
    commits: bool
    pending: int | None  # groups of copies that may still be under way when it issues


class Simulated(NamedTuple):
    """What a body costs in the steady state.

    Attributes:
        cycles: of the sub-core for one warp's run through the body.
        busy: of these, the cycles that each pipe is taken.
    """

    cycles: float
    busy: dict[str, float]


def simulate(
    body: Sequence[Instruction], warps: int, rounds: int = 16, warm: int = 4, phase: int = 7
) -> Simulated:
    """A straight-line body run over and over by `warps` warps of one sub-core.

    `rounds` runs per warp are simulated, of which the first `warm` do not count; the warps start
    `phase` cycles apart. Guarded forward branches are not taken.
    """
    code = [_step(i) for i in body if not (i.predicate and i.target and i.target > i.address)]
    count = len(code)
    position = [0] * warps
    pipe_of = [code[0].pipe] * warps
    scoreboards = [[0] * 7 for _ in range(warps)]
    copied = [0] * warps  # when the copies that no group holds yet arrive
    groups: list[deque[int]] = [deque() for _ in range(warps)]
    own = [phase * w for w in range(warps)]  # when nothing of the warp itself holds it back
    free = dict.fromkeys(_PIPES, 0)
    busy = dict.fromkeys(_PIPES, 0)
    total, mark = rounds * count * warps, warm * count * warps
    now, marked, last = -1, 0, 0
    for issue in range(total + 1):
        soonest, at, w = now + 1, _NEVER, 0
        for candidate in (last, *range(warps)):
            ready = max(own[candidate], free[pipe_of[candidate]], soonest)
            if ready < at:
                at, w = ready, candidate
                if ready == soonest:
                    break
        step = code[position[w]]
        now, last = at, w
        if issue == mark:
            marked = at
        if step.pipe != "control":
            free[step.pipe] = at + step.interval
            busy[step.pipe] += step.interval
            if step.pipe == "fmaheavy":  # half of the FP32 lanes
                free["fma"] = max(free["fma"], at + 1)
        boards = scoreboards[w]
        boards[step.write] = max(boards[step.write], at + step.latency)
        boards[step.read] = max(boards[step.read], at + min(step.latency, 12 + step.interval))
        if step.copies:
            copied[w] = max(copied[w], at + step.latency)
        elif step.commits:
            groups[w].append(max(copied[w], groups[w][-1] if groups[w] else 0))
            copied[w] = 0
        position[w] = (position[w] + 1) % count
        following = code[position[w]]
        pipe_of[w] = following.pipe
        earliest = at + step.stall
        for board in following.waits:
            earliest = max(earliest, boards[board])
        if following.pending is not None and len(groups[w]) > following.pending:
            earliest = max(earliest, groups[w][-1 - following.pending])
        own[w] = earliest
    runs = (total - mark) / count
    return Simulated(
        (now - marked) / runs,
        {pipe: taken * count / total for pipe, taken in busy.items() if taken},
    )


def _step(i: Instruction) -> _Step:
    kind = kind_of(i.name)
    pending = None
    if kind == "copy_wait":
        found = re.search(r"SB0, 0x([0-9a-f]+)", i.text)
        pending = int(found[1], 16) if found else 0
    return _Step(
        *COSTS[kind],
        stall=max(1, i.stall),
        # of the seven boards, nobody waits for the last
        write=min(i.write, 6),
        read=min(i.read, 6),
        waits=tuple(board for board in range(6) if i.wait >> board & 1),
        copies=i.name.startswith("LDGSTS"),
        commits=kind == "copy_commit",
        pending=pending,
    )


def residency(registers: int, shared: int, warps: int, family: str = "sm_86") -> int:
    """CTAs that an SM holds at a time, given a thread's registers and a CTA's bytes and warps.

    0 where not even one fits.
    """
    limits = LIMITS[family]
    return min(
        limits.registers // (32 * warps * -(-registers // 8) * 8),
        limits.shared // (shared + RESERVED),
        limits.warps // warps,
        limits.ctas,
    )


def loop_cycles(
    body: Sequence[Instruction],
    ctas: int,
    warps: int,
    phases: Sequence[int] = _PHASES,
    least: int = 1,
) -> dict[int, float]:
    """Cycles of an SM per run of one CTA through the body, by the number of resident CTAs.

    The warps of all of them spread evenly over the sub-cores.

    Args:
        body: straight code.
        ctas: the largest number of resident CTAs.
        warps: of a CTA.
        phases: how far apart the warps start, in cycles; the result is the mean.
        least: the smallest number of resident CTAs.
    """

    def mean(resident: int) -> float:
        on_each = -(-resident * warps // SUB_CORES)
        cycles = sum(simulate(body, on_each, phase=p).cycles for p in phases) / len(phases)
        return cycles * on_each / resident

    return {resident: mean(resident) for resident in range(least, ctas + 1)}


def makespan(
    iterations: Iterable[float], cycles: Mapping[int, float], sms: int = SMS, fixed: float = 0.6
) -> float:
    """Cycles until the last CTA of a launch ends; good to about 3%.

    Args:
        iterations: of each CTA, in the order of their start. Longest first shortens the tail.
        cycles: from `loop_cycles`; its largest key is the number of CTAs that an SM holds.
        sms: of the card.
        fixed: iterations that a CTA's prologue and epilogue are worth.
    """
    queue = deque(iterations)
    resident: list[list[float]] = [[] for _ in range(sms)]
    for _ in range(max(cycles)):
        for held in resident:
            if queue:
                held.append(queue.popleft() + fixed)
    clock = [0.0] * sms

    def next_end(sm: int) -> float:
        held = resident[sm]
        return clock[sm] + min(held) * cycles[len(held)] * len(held)

    events = [(next_end(sm), sm) for sm in range(sms) if resident[sm]]
    heapq.heapify(events)
    while events:
        end, sm = heapq.heappop(events)
        step = min(resident[sm])
        held = [left - step for left in resident[sm] if left - step > 1e-9]
        for _ in range(len(resident[sm]) - len(held)):
            if queue:
                held.append(queue.popleft() + fixed)
        resident[sm], clock[sm] = held, end
        if held:
            heapq.heappush(events, (next_end(sm), sm))
    return max(clock)
