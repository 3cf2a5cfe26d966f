"""What the machine code has to fulfil, and the times that the home card would take for it.

Gates hold on the card family they are named after; docs/kernels.md says why each of them is there.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fastbrain.kernels import cycles
from fastbrain.kernels.closed_forms import Loads, Work, alone, name_of, skewed, work_of
from fastbrain.kernels.facts import HMMA_VOLUME, Facts, Stretch
from fastbrain.kernels.launch import HOME
from fastbrain.kernels.production import CHAPTER, DENSE, Case

# milliseconds at 4 x 1024 tokens, 12 query heads in 4 groups, width 64; a run varies by 3%
ATTENTION_MS = {"attention.fwd": 0.31, "attention.bwd_dq": 0.45, "attention.bwd_dkv": 0.65}
SPREAD = 1.03
EXPERT_PRODUCTS = (
    "experts.hidden",
    "experts.hidden_grad",
    "grouped_gemm.rows",
    "grouped_gemm.weights",
)
# of the same kernels with all rows in one expert
BALANCED_RATIO, SKEWED_RATIO = 1.10, 1.25
TENSOR_SHARE = 0.90
COMPILE_SECONDS, COMPILE_CORES = 60.0, 2


class Gate(NamedTuple):
    """One requirement, and what was found."""

    name: str
    passed: bool
    found: str


class Times(NamedTuple):
    """Milliseconds of one launch on the home card, as predicted.

    Attributes:
        tensor: of its products at the rate of the tensor cores, or of FP32 units.
        memory: of its bytes.
        simulated: of its instructions; see `cycles`.
    """

    tensor: float
    memory: float
    simulated: float

    @property
    def predicted(self) -> float:
        return max(self.memory, self.simulated)


def of_code(facts: Facts, work: Work, case: Case, family: str) -> list[Gate]:
    """Gates of one specialisation, at the launch that it was compiled for."""
    bf16 = case.dtype == torch.bfloat16
    name = name_of(case.launch)
    least = 2 if family == HOME and _needs_two(name, case) else 1
    limit = cycles.LIMITS[family].shared_per_cta
    gates = [
        Gate("no spills", not facts.spills and not facts.spill_bytes, f"{facts.spill_bytes} bytes"),
        Gate("no float atomics", not facts.float_atomics, str(facts.float_atomics)),
        Gate(f"shared memory <= {limit:,}", facts.shared <= limit, f"{facts.shared:,}"),
        Gate(f"CTAs per SM >= {least}", facts.ctas >= least, str(facts.ctas)),
    ]
    if work.products:
        gates.append(_products(facts, work, bf16, family))
    if work.bulk:
        gates.append(_wide_loads(facts, work))
    if family == HOME and work.streams:
        times = predicted(facts, work)
        gates.append(
            Gate(
                "limited by bytes",
                times.simulated <= times.memory,
                f"{times.simulated:.3f} ms, bytes {times.memory:.3f} ms",
            )
        )
    if family == HOME and bf16 and name in EXPERT_PRODUCTS:
        share = tensor_share(facts, work)
        gates.append(
            Gate(f"tensor share >= {TENSOR_SHARE:.0%}", share >= TENSOR_SHARE, f"{share:.1%}")
        )
    return gates


def of_times(found: Iterable[tuple[Case, Facts]]) -> list[Gate]:
    """Gates of simulated times on the home card, from all launches and their machine code."""
    gates = []
    for case, facts in found:
        name = name_of(case.launch)
        if case.dtype != torch.bfloat16:
            continue
        if case.model is DENSE and name in ATTENTION_MS:
            bar = ATTENTION_MS[name]
            ms = predicted(facts, work_of(case.launch)).predicted
            gates.append(
                Gate(f"{name}, {case.shape}: <= {bar} ms", ms <= SPREAD * bar, f"{ms:.3f} ms")
            )
        if case.model is CHAPTER and name in EXPERT_PRODUCTS:
            gates += _ratios(case, facts)
    return gates


def of_compilation(cpu_seconds: float) -> Gate:
    """The production launches of the home card, spread evenly over the cores."""
    seconds = cpu_seconds / COMPILE_CORES
    name = f"compilation on {COMPILE_CORES} cores <= {COMPILE_SECONDS:.0f} s"
    return Gate(name, seconds <= COMPILE_SECONDS, f"{seconds:.0f} s")


def expected_products(facts: Facts, work: Work) -> float:
    """HMMA.16816 of a warp that the code must have, or as much in HGMMA."""
    return work.bodies * _volume(work) / (HMMA_VOLUME * facts.warps)


def hot_loops(facts: Facts, work: Work) -> list[Stretch]:
    """The loops that do the work: those with products, else those that read."""
    if not work.products:
        found = [loop for loop in facts.loops if loop.loads]
        return found[: len(work.ctas[0])] if work.ctas else found
    per_body = _volume(work) / (32 * facts.warps)
    return [x for x in facts.loops if x.products or x.multiply_adds >= per_body / 2]


def predicted(facts: Facts, work: Work) -> Times:
    """What one launch takes on the home card."""
    rate = cycles.TENSOR_FLOPS if facts.products else cycles.TENSOR_FLOPS / 2
    return Times(
        1e3 * work.flops / rate,
        1e3 * work.bytes / cycles.BYTES_PER_S,
        1e3 * _span(facts, work) / cycles.CLOCK_HZ,
    )


def tensor_share(facts: Facts, work: Work) -> float:
    """The least share of the tensor pipe's time that a loop with products uses."""
    loops = hot_loops(facts, work)
    return min((x.tensor_cycles / x.cycles[facts.ctas] for x in loops), default=0.0)


def wide_and_all(facts: Facts, work: Work) -> tuple[int, int]:
    """16-byte loads and all loads in the hot loops, or outside of them where there is none."""
    stretches = hot_loops(facts, work) or [facts.straight]
    return sum(x.loads.get(16, 0) for x in stretches), sum(sum(x.loads.values()) for x in stretches)


def _needs_two(name: str, case: Case) -> bool:
    if name in EXPERT_PRODUCTS:
        return True
    return name in ATTENTION_MS and case.launch.options["K"] == 64


def _products(facts: Facts, work: Work, bf16: bool, family: str) -> Gate:
    if not bf16:
        least = work.bodies * _volume(work) / (32 * facts.warps)
        return Gate(
            "FP32 products in FP32 units",
            not facts.tensor_kinds and facts.multiply_adds >= least,
            f"{facts.multiply_adds} FFMA of {least:.0f}, {len(facts.tensor_kinds)} tensor kinds",
        )
    mnemonic = "HGMMA" if family == "sm_90" else "HMMA"
    expected = expected_products(facts, work)
    right = all(kind.startswith(f"{mnemonic}.") for kind in facts.tensor_kinds)
    return Gate(
        f"{mnemonic} as the closed form",
        right and facts.products == expected,
        f"{facts.products:.0f} of {expected:.0f}, {' '.join(facts.tensor_kinds)}",
    )


def _wide_loads(facts: Facts, work: Work) -> Gate:
    """Each pass must read its bulk in loads as wide as the alignment of rows allows."""
    threads = 32 * facts.warps
    needed = sum(-(-n * size // (work.vector * threads)) for n, size in work.bulk)
    stretches = hot_loops(facts, work) or [facts.straight]
    found = min(sum(n for width, n in x.loads.items() if width >= work.vector) for x in stretches)
    return Gate(
        f"{work.vector}-byte loads", found >= needed, f"{found} of {needed} in the narrowest loop"
    )


def _ratios(case: Case, facts: Facts) -> list[Gate]:
    """Routed rows against the same rows in one expert."""

    def span(loads: Loads | None) -> float:
        work = work_of(case.launch, loads) if loads else work_of(case.launch)
        return _span(facts, work)

    one = span(alone)
    name = f"{name_of(case.launch)} {case.launch.grid[0]}, {case.shape}"
    found = {"balanced": (None, BALANCED_RATIO), "3:1": (skewed, SKEWED_RATIO)}
    gates = []
    for label, (loads, bar) in found.items():
        ratio = span(loads) / one
        gates.append(
            Gate(f"{name}: {label} <= {bar:.2f} x one expert", ratio <= bar, f"{ratio:.3f}")
        )
    return gates


def _volume(work: Work) -> int:
    return sum(m * n * k for m, n, k in work.products)


def _span(facts: Facts, work: Work) -> float:
    """Cycles of the launch's instructions."""
    if not facts.ctas or not work.ctas:
        return 0.0
    loops, ctas = hot_loops(facts, work), facts.ctas
    if not work.products or not loops:
        # equal CTAs, taken whole
        runs = work.ctas[0]
        each = facts.straight.cycles[ctas] if facts.straight.cycles else 0.0
        each += sum(n * loop.cycles[ctas] for n, loop in zip(runs, loops, strict=False))
        return _equal(len(work.ctas), each, ctas)
    first = loops[0]
    fixed = work.fixed
    if fixed is None:
        fixed = facts.straight.cycles[ctas] / first.cycles[ctas]
    # a loop that runs once has become straight code: it counts as the first one
    costs = [x.cycles[ctas] / first.cycles[ctas] for x in loops] + [1.0] * len(work.ctas[0])
    iterations = [sum(n * c for n, c in zip(runs, costs, strict=False)) for runs in work.ctas]
    return cycles.makespan(iterations, first.cycles, fixed=fixed)


def _equal(count: int, each: float, ctas: int) -> float:
    """Cycles of so many equal CTAs, each of which costs an SM `each` cycles."""
    full, rest = divmod(count, cycles.SMS * ctas)
    # those that do not fill all SMs are spread evenly
    return each * (full * ctas + -(-rest // cycles.SMS))
