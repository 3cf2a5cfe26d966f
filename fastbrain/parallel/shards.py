"""A model divided among the ranks (fully_shard, FSDP2): each keeps a part of every tensor.

Weights, gradients and moments are divided by their first dimension. A block's weights are gathered,
in FP32, for its forward and again for its backward, and given up after each; those outside of the
blocks (embedding, last norm, head) stay from the forward to the end of the backward.

PyTorch's part of this is imported when a model is divided: it takes a second, and 40 MB, that a
single process need not spend. What is a part is told by what it can do.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fastbrain.layers import Weight
from fastbrain.parallel.ranks import Ranks
from fastbrain.transformer import Transformer


def shard(module: Transformer, ranks: Ranks) -> None:
    """Divide a module, whose weights become those of the first rank, and move it to their devices.

    Parameters become DTensors. A forward and backward leaves in them each rank's part of the sum of
    the ranks' gradients, which add up over several, in FP32.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert ranks.group is not None
    for parameter in module.parameters():
        # one that was built without a seed would become a mixture
        ranks.spread(parameter)
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            # a sum over the ranks; by itself it would be their mean
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        if isinstance(each, Weight):
            each.drop_shadow()
            each.transient = True


def is_sharded(module: Transformer) -> bool:
    """Whether `shard` has divided it."""
    return module.embedding.transient


def give_up(module: Transformer) -> None:
    """Drop what a forward without a backward has left gathered."""
    if is_sharded(module):
        divided: Any = module
        divided.reshard()


def part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; writing to it writes the tensor."""
    divided: Any = tensor
    found: Tensor = divided.to_local() if _is_divided(tensor) else tensor
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is divided: then every rank has to call this."""
    divided: Any = tensor
    found: Tensor = divided.full_tensor() if _is_divided(tensor) else tensor
    return found


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Write all of a tensor, of which each rank may keep a part; they do not communicate."""
    if not _is_divided(tensor):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    divided: Any = tensor
    own = distribute_tensor(
        values.to(tensor.device), divided.device_mesh, divided.placements, src_data_rank=None
    )
    part(tensor).copy_(own.to_local())


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank has of these tensors."""
    return sum(part(tensor).nbytes for tensor in tensors)


def _is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")
