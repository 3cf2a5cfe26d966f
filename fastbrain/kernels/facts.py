"""What one specialisation's machine code says of itself, in numbers that fit a table."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastbrain.kernels import cycles
from fastbrain.kernels.launch import HOME
from fastbrain.kernels.machine_code import Compiled, Instruction, disassembled, innermost_loops

# M * N * K of one HMMA.16816, of a warp
HMMA_VOLUME = 16 * 8 * 16
# FFMA that tell a loop over FP32 products from others
_PRODUCT_LOOP = 64


class Stretch(NamedTuple):
    """A loop's body, or what a kernel executes outside its loops.

    Attributes:
        instructions: their number.
        products: HMMA instructions, or HGMMA in their measure: that of one HMMA.16816 and warp.
        multiply_adds: FFMA instructions.
        loads: from global memory, by the bytes that each thread gets: 4 (or less), 8 or 16.
        cycles: for 1 to n resident CTAs (or for n alone), of an SM for one CTA; see
            `cycles.loop_cycles`. Empty on cards other than the home one.
        tensor_cycles: of the above, what the tensor pipe needs.
    """

    instructions: int
    products: float
    multiply_adds: int
    loads: dict[int, int]
    cycles: dict[int, float]
    tensor_cycles: float


class Facts(NamedTuple):
    """One specialisation.

    Attributes:
        kernel: the name of its entry.
        registers: of one thread.
        spill_bytes: of one thread.
        spills: instructions that write or read them.
        shared: bytes of shared memory of one CTA.
        warps: of one CTA.
        ctas: that an SM holds; 0 where one is too large for it.
        products: of the whole code, as in `Stretch`.
        multiply_adds: of the whole code.
        tensor_kinds: the mnemonics of its tensor instructions.
        float_atomics: their number.
        loops: the innermost ones, in the order of their addresses.
        straight: what lies outside of them, on the path with the most wide accesses.
    """

    kernel: str
    registers: int
    spill_bytes: int
    spills: int
    shared: int
    warps: int
    ctas: int
    products: float
    multiply_adds: int
    tensor_kinds: list[str]
    float_atomics: int
    loops: list[Stretch]
    straight: Stretch


def read(compiled: Compiled, family: str) -> Facts:
    """Disassembles, counts and, for the home card, simulates."""
    code = disassembled(compiled.cubin, compiled.kernel)
    warps = compiled.warps
    ctas = cycles.residency(compiled.registers, compiled.shared, warps, family)
    simulated = ctas if family == HOME else 0
    loops = innermost_loops(code)
    inside = {i.address for body in loops for i in body}
    straight = [i for i in busiest_path(code) if i.address not in inside]
    names = [i.name for i in code]
    return Facts(
        compiled.kernel,
        compiled.registers,
        compiled.spills,
        sum(name.startswith(("LDL", "STL")) for name in names),
        compiled.shared,
        warps,
        ctas,
        _products(code, warps),
        sum(name.startswith("FFMA") for name in names),
        sorted({name for name in names if name.startswith(("HMMA", "HGMMA"))}),
        sum(map(_is_float_atomic, names)),
        [_stretch(body, warps, simulated) for body in loops],
        _stretch(straight, warps, simulated),
    )


def busiest_path(code: Sequence[Instruction]) -> list[Instruction]:
    """Of the ways through a kernel, each loop once, the one with the most 16-byte accesses.

    Of several, it is the shortest. So full blocks stand for a kernel that also has code for the
    rest of a row, and a kernel's early exits do not count.
    """
    where = {i.address: n for n, i in enumerate(code)}
    # for each instruction the best (16-byte accesses, -instructions) from there on, and the next
    best: list[tuple[int, int]] = [(0, 0)] * (len(code) + 1)
    following = [len(code)] * len(code)
    for n in range(len(code) - 1, -1, -1):
        i = code[n]
        ends = i.name.startswith("EXIT") and not i.predicate
        choices = [] if ends else [n + 1]
        if i.name.startswith("BRA") and i.target is not None:
            forward = where[i.target]
            if forward > n:
                choices = [n + 1, forward] if i.predicate else [forward]
            elif not i.predicate:
                # a loop that is left from its middle, or the trap behind the last instruction
                choices = []
        if choices:
            following[n] = max(choices, key=lambda m: best[m])
        wide, length = best[following[n]]
        wide += ".128" in i.name and i.name.startswith(("LDG", "STG"))
        best[n] = wide, length - 1
    path, n = [], 0
    while n < len(code):
        path.append(code[n])
        n = following[n]
    return path


def _stretch(body: Sequence[Instruction], warps: int, ctas: int) -> Stretch:
    products = _products(body, warps)
    loads = Counter(
        16 if ".128" in i.name else 8 if ".64" in i.name else 4
        for i in body
        if i.name.startswith(("LDG.", "LDGSTS"))
    )
    multiply_adds = sum(i.name.startswith("FFMA") for i in body)
    times: dict[int, float] = {}
    if ctas and body and products:
        times = cycles.loop_cycles(body, ctas, warps)
    elif ctas and body:
        # an FP32 product's loop may run with fewer CTAs at the end; other CTAs are all alike
        least = 1 if multiply_adds >= _PRODUCT_LOOP else ctas
        times = cycles.loop_cycles(body, ctas, warps, phases=(7,), least=least)
    tensor = cycles.tensor_cycles(body) * warps / cycles.SUB_CORES if ctas else 0.0
    return Stretch(
        len(body),
        products,
        multiply_adds,
        dict(loads),
        times,
        tensor,
    )


def _products(body: Iterable[Instruction], warps: int) -> float:
    total = 0.0
    for i in body:
        base, *modifiers = i.name.split(".")
        if base == "HMMA":
            # 16816 is 16 x 8 x 16, 1688 is 16 x 8 x 8
            total += int(modifiers[0][3:]) / 16
        elif base == "HGMMA":
            m, n, k = map(int, modifiers[0].split("x"))
            # one instruction of the four warps of a group
            total += m * n * k / HMMA_VOLUME / 4
    return total


def _is_float_atomic(name: str) -> bool:
    base, *modifiers = name.split(".")
    floats = any(m.startswith(("F16", "F32", "F64", "BF16")) for m in modifiers)
    return base in ("RED", "ATOM", "ATOMG", "ATOMS") and floats
