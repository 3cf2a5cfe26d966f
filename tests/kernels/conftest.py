"""Which implementations the property tests run against, and inputs on the device under test."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastbrain.kernels import fused, reference


@pytest.fixture(params=[reference, fused], ids=lambda module: module.__name__.rpartition(".")[2])
def twin(request):
    """A module with every operation of the facade."""
    return request.param


@pytest.fixture
def randn(device):
    """Makes normal numbers that want a gradient."""
    return lambda *shape: torch.randn(*shape, device=device, requires_grad=True)


@pytest.fixture
def tensor(device):
    """`torch.tensor` on the device under test."""
    return partial(torch.tensor, device=device)


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def dtype(request):
    """The dtypes of an implementation: in FP64 the reference shows that it is right."""
    twin = request.getfixturevalue("twin") if "twin" in request.fixturenames else reference
    if request.param == torch.float64 and twin is fused:
        pytest.skip("kernels compute in FP32")
    return request.param


@pytest.fixture
def hollow(device, tmp_path):
    """Makes zeros by the thousand million, of which a CPU stores only what is written.

    They are a file with a hole: memory that no process has to be granted.
    """

    def make(elements, dtype):
        if device.type == "cuda":
            if torch.cuda.mem_get_info()[0] < elements * dtype.itemsize:
                pytest.skip("the card has no room for it")
            return torch.zeros(elements, dtype=dtype, device=device)
        path = tmp_path / "hollow"
        made = torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
        path.unlink()
        return made

    return make


@pytest.fixture
def far(device, hollow):
    """Copies a tensor to where strides reach past 2^31 elements, the last axis side by side.

    On a CPU as many zeros lie before it, so that offsets which wrap around find wrong numbers
    instead of ending the process.
    """

    def make(x, *strides):
        strides = (*strides, 1)
        reach = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        assert reach >= 2**31
        before = 2**31 if device.type == "cpu" else 0
        memory = hollow(before + reach + 1, x.dtype)
        return memory.as_strided(x.shape, strides, before).copy_(x.detach())

    return make


class Recorder(TorchDispatchMode):
    """Lists what PyTorch computes under it: operations, and the shapes of all their results."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.operations.append(func.overloadpacket.__name__)
        self.shapes += [x.shape for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result


@pytest.fixture
def recorder():
    """A context that lists the `operations` in it and the `shapes` of their results."""
    return Recorder()
