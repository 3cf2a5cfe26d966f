"""A launch compiled for a card that need not be here, and what its machine code says of itself."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastbrain.kernels.launch import Launch

_TYPES = {
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32",
    "torch.float64": "fp64", "torch.int32": "i32", "torch.int64": "i64", "torch.bool": "i1",
    "torch.uint8": "u8", "torch.int8": "i8",
}  # fmt: skip


class Instruction(NamedTuple):
    """One machine instruction with its control codes.

    Attributes:
        address: in bytes from the kernel's entry.
        name: mnemonic and modifiers, such as LDG.E.128.
        predicate: its guard, such as @!P0, or nothing.
        stall: cycles its warp then waits before the next one.
        write: the scoreboard that its result releases; 7 is none.
        read: the scoreboard that reading its operands releases; 7 is none.
        wait: a bit for every scoreboard that it waits for.
        target: the address a branch goes to, or None.
        text: mnemonic and operands.
    """

    address: int
    name: str
    predicate: str
    stall: int
    write: int
    read: int
    wait: int
    target: int | None
    text: str


class Compiled(NamedTuple):
    """One specialisation's machine code.

    Attributes:
        kernel: the name of its entry.
        cubin: the binary.
        registers: of one thread.
        spills: bytes of the stack of one thread, where registers are kept that ran out.
        shared: bytes of shared memory of one CTA.
        warps: of one CTA.
    """

    kernel: str
    cubin: bytes
    registers: int
    spills: int
    shared: int
    warps: int


def compiled(launch: Launch, family: str) -> Compiled:
    """The machine code of this launch for a card family such as "sm_86"."""
    signature, constants, attributes = specialisation(launch)
    options = {k: v for k, v in launch.options.items() if k not in signature}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(family.removeprefix("sm_")), 32)
    code = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    registers, spills = _resources(code.asm["cubin"], code.metadata.name)
    return Compiled(
        code.metadata.name,
        code.asm["cubin"],
        registers,
        spills,
        code.metadata.shared,
        code.metadata.num_warps,
    )


def specialisation(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and divisibilities, as Triton's own launcher would read them off."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, None
        if position < len(launch.args):
            value = launch.args[position]
        elif name in launch.options:
            value = launch.options[name]
        specialised = not parameter.do_not_specialize
        one = specialised and type(value) is int and value == 1
        if parameter.is_constexpr or value is None or one:
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            # PyTorch's allocations start at multiples of 16 bytes
            signature[name] = "*" + _TYPES[str(value.dtype)]
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, bool):
            signature[name], divisible = "u1", False
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0
        else:
            signature[name], divisible = "fp32", False
        if specialised and divisible:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def disassembled(cubin: bytes, kernel: str) -> list[Instruction]:
    """The kernel's instructions, in the order of their addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return instructions(run_tool("nvdisasm", "-hex", "-c", "-ndf", file.name), kernel)


def instructions(listing: str, kernel: str) -> list[Instruction]:
    """The kernel's part of what `nvdisasm -hex -c` prints.

    Raises:
        ValueError: the listing has no such kernel.
    """
    rows: list[tuple[int, str]] = []
    codes: list[int] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    inside = False
    for line in listing.splitlines():
        if found := re.match(r"\.text\.(\S+):", line):
            inside = found[1] == kernel
        elif not inside:
            continue
        elif line.startswith("//----"):
            inside = False
        elif found := re.match(r"(\.L_\S+):", line):
            waiting.append(found[1])
        elif found := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/", line):
            labels |= dict.fromkeys(waiting, int(found[1], 16))
            waiting = []
            rows.append((int(found[1], 16), found[2]))
        elif found := re.match(r"\s+/\* 0x([0-9a-f]+) \*/", line):
            # the upper half of an encoding, on a line of its own, holds the control codes
            codes.append(int(found[1], 16))
    if not rows:
        kernels = re.findall(r"^\.text\.(\S+):", listing, re.MULTILINE)
        raise ValueError(f"kernel must be one of {kernels}, got {kernel!r}")
    return [_instruction(*row, code, labels) for row, code in zip(rows, codes, strict=True)]


def innermost_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The bodies of the loops that hold no other loop, each up to its backward branch."""
    where = {instruction.address: n for n, instruction in enumerate(code)}
    spans = [
        (where[i.target], n)
        for n, i in enumerate(code)
        # the jump to itself after the last instruction is no loop, nor are waits for a lock
        if i.name.startswith("BRA") and i.target in where and where[i.target] < n - 3
    ]
    return [
        list(code[first : last + 1])
        for first, last in spans
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
    ]


def _instruction(address: int, text: str, code: int, labels: dict[str, int]) -> Instruction:
    predicate, body = text.split(None, 1) if text.startswith("@") else ("", text)
    goal = re.search(r"`\((\.L_\S+?)\)", body)
    return Instruction(
        address,
        body.split()[0],
        predicate,
        stall=code >> 41 & 15,
        write=code >> 46 & 7,
        read=code >> 49 & 7,
        wait=code >> 52 & 63,
        target=labels.get(goal[1]) if goal else None,
        text=body,
    )


def _resources(cubin: bytes, kernel: str) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = run_tool("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def run_tool(name: str, *arguments: str) -> str:
    """The output of one of the binary tools that Triton's wheel carries."""
    path = getattr(triton.knobs.nvidia, name).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
