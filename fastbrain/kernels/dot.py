"""Matrix product and rounding, the two things that Triton's interpreter gets wrong in BF16.

It multiplies the raw bits of BF16 operands, and it cuts FP32 off to BF16 instead of rounding. Every
kernel therefore multiplies by `dot` and narrows by `narrow`, which compile to the plain
instructions and, interpreted, give what a card gives.
"""

import triton
import triton.language as tl

# a process has one mode, read when kernels are decorated
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in FP32. PRECISION "ieee" keeps FP32 operands exact: Triton's default is TF32."""
    if INTERPRETED:
        # no product changes: those of BF16 numbers are exact in FP32
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """FP32 x rounded to the nearest of DTYPE, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
