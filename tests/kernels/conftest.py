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
