"""Which errors say that memory ran out, and what to do about it, in the order of cost."""

from collections.abc import Iterable

from fastbrain.errors import Cuda, CudaMemoryBudget
from fastbrain.plan import Remedy

# what PyTorch and the CUDA libraries say in a plain RuntimeError
_SAYINGS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def reason(error: BaseException) -> str | None:
    """In one line, how memory ran out; None if that is not what the error says."""
    if isinstance(error, CudaMemoryBudget):
        return str(error)
    said = str(error.__cause__ or error) if isinstance(error, Cuda) else str(error)
    if isinstance(error, MemoryError | Cuda) or (
        isinstance(error, RuntimeError) and any(saying in said for saying in _SAYINGS)
    ):
        first = said.strip().partition("\n")[0]
        return first or "the machine has no more to give"
    return None


def advice(found: Iterable[Remedy]) -> str:
    """The remedies as a list, each with what it saves of this shape."""
    numbered = (f"  {number}. {remedy}" for number, remedy in enumerate(found, 1))
    return "\n".join(("In order, cheapest first:", *numbered))
