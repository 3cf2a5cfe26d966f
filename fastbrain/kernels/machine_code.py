"""A launch compiled for a card that need not be here, and what its machine code says of itself."""

import re
import subprocess
import tempfile
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


class Compiled(NamedTuple):
    """One specialisation's machine code.

    Attributes:
        kernel: the name of its entry.
        cubin: the binary.
        registers: of one thread.
        spills: bytes of local memory of one thread.
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
    signature, constants, attributes = _specialisation(launch)
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


def _specialisation(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
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


def _resources(cubin: bytes, kernel: str) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = run_tool("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+).*? LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def run_tool(name: str, *arguments: str) -> str:
    """The output of one of the binary tools that Triton's wheel carries."""
    path = getattr(triton.knobs.nvidia, name).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
